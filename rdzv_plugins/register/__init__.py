"""Registers that a majority of equal members keeps, without a leader: CASPaxos (Rystsov, 2018).

This package has no I/O, no thread and no clock. `acceptor` and `member` are a member's part,
`proposer` is a client's part, `messages` has their messages. A driver carries the messages.

These rules hold although messages get lost, late or doubled, and members stop, end or restart:

1. A *register* has a key and a value; a change computes the next value from the last value.
2. A change is done once a majority of the members has accepted it. A read is done once a majority
   holds the same value. A dead or unreachable member delays neither, except a change to which it
   has just promised, until the driver passes it over.
3. Within one *generation* each register is linearizable: its changes form one line, and a later
   request sees no earlier state.
4. Members keep everything in memory: a member that starts has no memory, and a new *incarnation*,
   which is larger than all earlier ones.
5. A member accepts a value only in the incarnation in which it promised, and only if it knows no
   later incarnation of any member that promised with it.
6. A new member answers clients only after other members, a majority of all, have sent copies of the
   registers and promises of one generation. Its request tells them its incarnation.
7. If fewer members take part, a majority of the members agrees on a new generation. It begins with
   the latest memory of these members, and they take part in no earlier generation.
8. A new generation may lack the last changes of the previous one. But no earlier generation changes
   after a change in a later one, because a restarted member agrees to no generation for as long as
   a writer lets an acceptance count.
9. A member that reaches a working majority refuses a new generation. A member that finds a majority
   at work in another generation discards its own memory.
10. A register that is empty in all members is forgotten, and no late message restores it.

The order of generations and incarnations depends on the wall clocks of the members' hosts only
while a majority has lost its memory and the others are cut off. Rule 8 needs clocks that count the
time for which a host was suspended.
"""
