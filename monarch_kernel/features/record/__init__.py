"""Run records: what an interactive run has executed, in one file from which it can be compared and run again.

Theory of operation
===================

`recorder.Recorder` gets events: cells from the notebook, loops from the controller (`controller.RecordExtension` listens to the
live loops), and notes of ranks (`worker`). Each method puts a small tuple into a queue. The thread of `writer.RecordWriter`
takes it from there, joins what ranks have said of one step (`collecting.Collector`), and commits to SQLite twice a second. So
no rank and no cell waits for the disk, and a crash loses less than a second. If the disk fails, the writer says so once and
drops the rest; what it has committed stays readable.

A rank computes digests and nothing else: of each batch of a DataLoader, of the parameters of its modules and of its random
generators every `worker.EVERY` steps and at the end of a loop. They travel with the reports of the loop. Before each cell the
controller asks for the state of the random generators, with a message that the main thread handles in its turn before the cell.

`reading` opens a record, `differences` compares two, `exporting` writes a script or a notebook. `train.record` is the public
part, and runs a record again.
"""
