"""Registers that a majority of equal members keeps, without a leader: CASPaxos (Rystsov, 2018).

This package has no I/O, no thread and no clock. `acceptor` and `member` are a member's part,
`proposer` is a client's, `messages` is what they say. A driver carries the messages.

What is guaranteed, whatever is lost, late or doubled, and whoever stops, ends or starts again:

1. A *register* has a key and a value; a change computes the next value from the last one.
2. A change is done once a majority of the members has accepted it, and a read is done once a
   majority holds the same; a member that is dead, stopped or cut off delays neither, except a
   change to which it has just promised, until the driver passes it over.
3. Within one *generation* each register is linearizable: its changes form one line, and whoever
   begins later sees no earlier state.
4. Members keep everything in memory: a member that starts has no memory, and a new *incarnation*,
   which is larger than each before.
5. A member accepts a value only in the incarnation in which it promised to, and only if it knows
   no later incarnation of any member that has promised with it.
6. A new member answers clients only once a majority of the members, itself not counted, has sent it
   copies of all registers and promises of one generation; its request tells them its incarnation.
7. Where fewer take part, a majority of the members agrees on a new generation; it begins with the
   most advanced memory of those who agree, and who has agreed takes no part in an earlier one.
8. A new generation may lack the last changes of the one before; but nothing is changed in an
   earlier generation after a change in a later one, since a member that has started agrees to none
   for as long as a writer lets an acceptance count.
9. A member that reaches a majority at work refuses a new generation, and a member that finds a
   majority at work in another generation discards its own memory.
10. A register that is empty in all members is forgotten, and no late message brings it back.

The order of generations, and of incarnations, rests on the wall clocks of the members' hosts only
where a majority has lost its memory and the others are cut off. Sentence 8 needs clocks that do not
stand still, as those that count the time for which a host was suspended.
"""
