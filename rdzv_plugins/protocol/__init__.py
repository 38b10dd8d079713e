"""The rendezvous protocol, without I/O, threads or torch: nodes, rounds, leases, and who leads.

One node of a run is one `node.Node`. Its life is a generator of *effects* (`effects`): each is a
request, such as "compare and set this key" or "wait until that key changes", and the answer is sent
back into the generator. A *driver* carries the effects out. This package has one that runs in a
thread on a real store (`rdzv_plugins.driver`); the simulator of the tests has one on virtual time,
and it drives the same code.

What a driver owes a node:

- One effect at a time: it sends the answer, or throws `RendezvousConnectionError` (the store could
  not be reached in time; whether the request was done may be unknown) or `RendezvousStateError`
  (the store answered, and refuses) into the generator, before it asks for the next effect.
- A request takes at most the request timeout of the `rules.Rules` that the node was made with.
- `effects.Park` and `effects.Rest` end early when an order arrives (`Node.order_join`,
  `Node.order_withdrawal`, `Node.report_done`), and may end early at any time.
- The clock is monotonic, in seconds, and is compared with no other host's.
- `effects.OpenMaster` and `effects.DialPeer` do not hold up what follows them: see there.
- `effects.FinishJoin` releases whoever ordered the join. Nothing else ends a join.

What a node owes its driver:

- It decides everything. A driver has no rule of the protocol, and looks into no document.
- It ends by itself never: the driver stops asking. After the last effect of `Node.run` the driver
  may carry out `Node.farewell`, which announces that the node leaves.
- Every error that the contract of a store names is handled inside. Any other error is a bug.
- `Node.waiting`, `Node.over`, `Node.in_round` and `Node.latest` may be read by any thread at any
  time, without I/O.

Where a rule is: `decide` has the tables by which every node decides, and the node that leads, as
pure functions of a `rules.View`. `situation` derives from a view who lives, is awaited, ready or
gone, and how large a round would be; `rounds` makes one round document of another; `words` has what
people should know. `observer` keeps what a node has read and since when,
`failure_detector` judges by it who is alive, `record_cache` holds the records of all nodes, `ranks`
orders the participants, `roster` keeps those of a large round in shards, `cleanup` ends a run and
tidies up, `contact` tells when a node that is not heard stops its workers, `parting` has a node
that gives up leave a run that others can go on with, and close any other, `network_check` finds out
what a node reaches and `links` what that means for a round, `diagnosis` says in a sentence what a
run does and waits for, `states` in a word what a node does, `wall_clock` shows people the times
that hosts wrote, `documents` is what stands in the store. docs/design.md has the rules by their
numbers, and why they are so.
"""
