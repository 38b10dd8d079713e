"""The rendezvous protocol, without I/O, threads or torch: nodes, rounds, leases, and who leads.

One node of a run is one `node.Node`. Its life is a generator of *effects* (`effects`): each is a
request, such as "compare and set this key" or "wait until that key changes", and the answer is sent
back into the generator. A *driver* carries the effects out. This package has one that runs in a
thread on a real store (`process.driver`); the simulator of the tests has one on virtual time, and
it drives the same code. The shortest one, whose ``perform`` makes a request of each effect that
asks the store::

    def drive(node, client, archive):
        node.order_join()
        life, answer, error = node.run(), None, None
        while True:
            effect = life.throw(error) if error is not None else life.send(answer)
            answer = error = None
            try:
                match effect:
                    case effects.FinishJoin(outcome):
                        return outcome
                    case effects.OpenMaster():
                        node.finished(effect, "127.0.0.1:29500")
                    case effects.DialPeer():
                        node.finished(effect, 0.0)
                    case effects.HoldLinks():
                        pass
                    case effects.Tell(about, text):
                        print(f"{about}: {text}")
                    case effects.Rest(seconds):
                        time.sleep(seconds)
                    case _:
                        answer = perform(client, archive, effect)
            except (RendezvousConnectionError, RendezvousStateError) as failure:
                error = failure

What each effect asks, and its answer:

- `Read`: the `Entry` of a key, or None. `List`: those of a prefix, by key.
- `CompareAndSet`: the `Entry` that stands after it, and whether that was written.
- `Park`: the `Entry` of a key once it differs, or None. `Rest`: None, when its seconds are over.
- `ReadTombstone`: how an incarnation of the run ended, or None. `ReadExclusions`: a tuple of them.
- `PutRecord` (this node's record, and the bell), `PutShards` (a roster), `Ring` (the bell),
  `PutTombstone`, `Drop` (keys), `DropStores` (c10d stores), `Expire` (the run's deadline),
  `RecordHistory` and `Register` (rounds and runs, for people): None, when it is done.
- `OpenMaster` and `DialPeer`, each a `Begin`: None, at once or soon.
  The driver calls `Node.finished` when it is done, in any thread.
- `HoldLinks` (connections to other nodes): None, at once. The driver calls `Node.report_gone` where
  the process at the other end has ended, as far as it can tell, `Node.report_back` where it
  answers after all, and `Node.report_others` with what those at the other ends say of themselves.
  A driver without links does nothing.
- `Tell` (a line for people), `FinishJoin` (release the agent that waits for a round): None.

What a driver owes a node:

- One effect at a time: it sends the answer, or throws `RendezvousConnectionError` (the store could
  not be reached in time; whether the request was done may be unknown) or `RendezvousStateError`
  (the store answered, and refuses) into the generator, before it asks for the next effect.
- A request takes at most the request timeout of the `rules.Rules` that the node was made with.
- `Park` and `Rest` end early when an order arrives (`Node.order_join`, `Node.order_withdrawal`,
  `Node.report_done`), and may end early at any time.
- The clock is monotonic, in seconds, and is compared with no other host's. It should go on while
  the host is suspended, as it does while a process is: the others count that time.

What a node owes its driver:

- It decides everything. A driver has no rule of the protocol, and looks into no document.
- It ends by itself never: the driver stops asking. After the last effect of `Node.run` the driver
  may carry out `Node.farewell`, which announces that the node leaves.
- Every error that the contract of a store names is handled inside. Any other error is a bug.
- `Node.waiting`, `Node.over`, `Node.in_round` and `Node.latest` may be read by any thread at any
  time, without I/O.

Words:

- *run*: all that one ``--rdzv-id`` names at a time; *incarnation*: the random number that tells
  apart the runs which an id names one after the other.
- *node*: an agent of torchrun as the protocol sees it. Its *record* says what it does; the *beat*
  in the record grows with each *heartbeat*. A node is *lost* once the beat has stood still for its
  *lease*.
- *round*: a number that grows with each change of membership. It *forms*, is *confirmed*, and
  *runs*. Its *participants* have ranks; ``world_id`` tells apart two rounds of one number.
- *document*: the one thing that all nodes agree on. Its *place* is its round and phase; a store
  moves it forward only. *Latest*: the document of the highest place that a node has read.
- *leader*: the node that turns records into rounds. The *bell* wakes it; its *heirs* replace it.
- *last call*: the time for which a round that has enough nodes waits for more.
- *newcomer*: a node that waits while a round runs, and that may end it; *spare*: one that may not.
- *doubted*: a node whose lease has run out, and which has one more since many fell silent at once.
- *done*: a node whose workers succeeded. *Gone*: one that has left, is done or is lost.
- *roster*: the participants of a large round, in *shards* beside the document.
- *tombstone*: what tells, after the keys of a run have expired, that the run was closed.

Where a rule is: `decide` has the tables by which every node decides, and the leader, as pure
functions of a `rules.View`. `situation` derives from a view who lives, is awaited, ready or gone,
and how large a round would be; `rounds` makes one round document of another; `sizes` says how many
nodes it may have. `policies` has a file for each policy. `accusations` loses nodes whose processes
have ended. `documents` is what stands in the store, `roster` the participants of a large round.

Where a node's state is: `node` reads, decides and acts, turn by turn. `observer` keeps what the
node has read and since when; `failure_detector` judges by it who is alive, and `record_cache` holds
the records of all nodes. `heartbeat` writes the node's own record. `join` has what its agent asks
for, `lead` what a leader does beside its decisions, `master` how rank 0 opens its TCPStore,
`neighbours` the links and what they tell, `network_check` what the node reaches, and `contact` when
a node that is not heard stops its workers.

Besides: `cleanup` ends a run and tidies up. `parting` has a node that gives up leave a run that
others can go on with, and close any other. `orders` are people's. `words` says in sentences what a
run does and waits for, `states` in a word what a node does, and `wall_clock` shows people the times
that hosts wrote.

docs/protocol.md has the rules by their names, and why they are so.
"""
