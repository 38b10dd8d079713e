"""The rendezvous protocol, without I/O, threads or torch: nodes, rounds, leases, and who leads.

One node of a run is one `node.Node`. Its life is a generator of *effects* (`effects`): each effect
is a request, such as "compare and set this key", and its answer is sent back into the generator.
A *driver* carries the effects out. `process.driver` runs in a thread on a real store; the
simulator of the tests drives the same code on virtual time. A minimal driver, whose ``perform``
makes a request of each effect that asks the store::

    def drive(node, client, archive):
        node.inbox.join()
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
                    case effects.KeepLinks():
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

- `Read`: the `Entry` of a key, or None. `List`: the entries of a prefix, by key.
- `CompareAndSet`: the `Entry` of the key after it, and whether the value was written.
- `Park`: the `Entry` of a key once it differs, or None. `Rest`: None, after its seconds.
- `ReadTombstone`: how an incarnation of the run ended, or None. `ReadExclusions`: a tuple of them.
- `PutRecord` (this node's record, and the bell), `PutShards` (a roster), `Ring` (the bell),
  `PutTombstone`, `Drop` (keys), `DropStores` (c10d stores), `Expire` (the run's deadline),
  `RecordHistory` and `Register` (rounds and runs, for people): None.
- `OpenMaster` and `DialPeer`, each a `Begin`: None, at once or soon.
  The driver calls `Node.finished` when the work has ended, in any thread.
- `KeepLinks` (connections to other nodes): None, at once. The driver calls `report_dead` of
  `Node.neighbours` if the process at the other end has ended, `report_alive` if it answers after
  all, and `report_others` with what the other ends say of themselves. A driver may keep no links.
- `Tell` (a line for people), `FinishJoin` (release the agent that waits for a round): None.

What a driver owes a node:

- One effect at a time: before it asks for the next effect, it sends the answer or throws an error
  into the generator: `RendezvousConnectionError` (the store could not be reached in time, and the
  request may have been done) or `RendezvousStateError` (the store answered, but what it holds or
  demands cannot be used). A store that refuses this node raises `AccessDeniedError`, a kind of the
  first: see `contact`.
- A request takes at most the request timeout of the node's `rules.Rules`.
- `Park` and `Rest` end early when `Inbox.wake` is called, and may end early at any time.
- The clock is monotonic, in seconds, and is compared with no other host's clock. It should go on
  while the host is suspended, because the other nodes count that time.

What a node owes its driver:

- It decides everything. A driver has no rule of the protocol, and reads no document.
- It never ends by itself: the driver stops asking. After the last effect of `Node.run` the driver
  may carry out `Node.farewell`, which announces that the node leaves.
- It handles every error that the contract of a store names. Any other error is a bug.
- `Node.num_nodes_waiting`, `Node.over`, `Node.trains_on`, `Node.in_round` and `Node.latest` may be
  read by any thread at any time, without I/O.

Words:

- *run*: all that one ``--rdzv-id`` names at a time; *incarnation*: a random number that tells apart
  successive runs of one id.
- *node*: an agent of torchrun as the protocol sees it. Its *record* says what it does; the *beat*
  in the record grows with each *heartbeat*.
- *silent*: the beat has stood still for the *lease*. `Situation.silent`, of the leader and of
  commands; a node with one more lease is silent and not lost.
- *doubted*: late or silent with a large part of the world, and given one more lease. Set by
  `FailureDetector.doubt`; `Situation.doubted` has the silent ones of them.
- *accused*: a neighbour says in its record (``accuses``) that the node's process has ended. The
  leader asks the node in the document (``accused``); if the leader is accused, the neighbour asks.
- *lost*: silent for the lease, the reader's *lag* and the *forgiven* seconds together, or accused
  without an answer (`Situation.lost`).
- *done*: its workers succeeded (`Status.DONE`, which the node writes itself).
- *gone*: it has left, is done or is lost. `Situation.is_gone`; the leader alone decides by it.
- *absent*: a participant of the running round that is gone and has not come back, in
  `Situation.absent`; the others are *present*. ``document.absent`` tells them to all nodes of a
  round that goes on without them (``restart_on_loss=false``).
- *evicted*: a live participant that did not ask for the next round within ``rejoin_timeout``
  (`Cause.evicted`). The document keeps it in ``still_running`` until its workers have ended.
- *cut off*: a node takes itself for lost, because the store accepts no heartbeat of it, and stops
  its workers. Set by `Contact`; only the node itself and its agent read it.
- *unfit*: its check failed, and it asks for no round. The node writes it into its record.
- *at fault*: the leader's verdict on the network check (`Faults.out`) makes the node unfit.
- *kept out*: people or the leader let no round name it (`Situation.kept_out`). *Taken out*: a
  participant that is kept out now, so that its round ends (`Situation.taken_out`). *Not admitted*:
  it asks for a round, and the next round does not take it (`Situation.not_admitted`).
- *round*: a number that grows with each change of membership. It *forms*, is *confirmed*, and
  *runs*. Its *participants* have ranks; ``world_id`` tells apart two rounds of one number.
- *document*: the one value that all nodes agree on. Its *place* is its round and phase; a store
  only moves it forward. *Latest*: the document of the highest place that a node has read.
- *leader*: the node that turns records into rounds. The *bell* wakes it. A *successor* is whichever
  node takes the lead next: nobody appoints it, and the nodes try in turn.
- *last call*: the time for which a round that has enough nodes waits for more.
- *newcomer*: a node that waits while a round runs, and that may end it; *spare*: a node that waits
  and may not end it now.
- *roster*: the participants of a large round, in *shards* beside the document.
- *tombstone*: tells that a run was closed after its keys have expired.

Rules: `decide` has the tables by which every node decides, as pure functions of a `rules.View`.
`situation` derives from a view which nodes live, are awaited, ready or gone; `rounds` makes one
round document of another; `sizes` says how many nodes a round may have. `policies` has a file for
each policy. `accusations` loses nodes whose processes have ended. `documents` has the stored
values, `roster` the participants of a large round.

State: `node` reads, decides and acts, turn by turn. `observer` keeps what the node has read and
since when, with `failure_detector` (who lives), `answers` (of the accused), `outages`, `since` and
`record_cache`. `heartbeat` writes the node's own record. `join` has what its agent asks for,
`writer` changes the document, `lead` has what a leader does beside its decisions, `master` how
rank 0 opens its TCPStore, `neighbours` the links, `network_check` what the node reaches,
`own_checkpoint` its part in a checkpoint, and `contact` when a node whose heartbeats do not arrive
stops its workers.

Besides: `cleanup` ends a run and deletes what it leaves, `parting` leaves or closes it, `orders`
are people's. `words` says in a sentence what a run does and waits for, `remarks` what a node logs
besides, `states` in a word what a node does, and `wall_clock` shows the times that hosts wrote.

docs/protocol.md has the rules by their names, and why they are so.
"""
