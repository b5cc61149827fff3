"""Distributed tensors: operations that the program issues, and that all ranks of a mesh do, each on its own part.

Theory of operation
===================

`monarch_kernel.tensor` is what users import. It turns each ATen operation of the program into a record of a few integers, and
waits for nothing. This folder takes the records to the ranks, where `worker` does the operations in order.

*Records.* An operation with its arguments, tensors left out, is an *entry*. The program sends an entry once (`DefineOp`).
Afterwards a record is the number of the entry, the id of the first new tensor, the ids of the tensors that it takes, and its
numbers (`records`). Ids of tensors are unique in a session.

*Batches.* Records travel in batches (`stream`). A batch is submitted to the I/O thread when it gets its first record, and takes
more records until that thread sends it, or until the program sends the ranks anything else. So a rank sees operations, cells,
calls, pushes and pulls in the order in which a thread of the program issued them, and the program need not flush anything. All
of them run on the main thread of the rank.

*Lifetime.* When Python drops a distributed tensor, its id goes to the end of the batch that is open then: all operations that
use the tensor are in this batch, or in earlier ones.

*Failures.* If an operation raises on a rank, its results there, and what it would have changed, become a `records.Poison`. An
operation that takes a poison is not run, and its results are poisoned, too. To read a poison raises the error, with the line of
the program that issued the operation. All else is unaffected.

*Other code.* A distributed tensor in a message, such as a push or a call, is a reference, which the receiving rank resolves to
its part (`parts`, `sending`). A function that ranks call is an entry (`functions`), and so are the operations of a recorded
function together (`blocks`). An operation can wait for the result of an actor (`results`).

*Flow.* Ranks report from time to time how many operations they have done (`OpsDone`). The program waits if they are too many
operations behind.
"""
