"""Traffic: counts the bytes that each rank sends and receives, by data path.

Theory of operation
===================

The process that moves bytes counts them: a few sums under a lock. A rank whose counts have changed reports them at most
four times a second (`Metered`), as they are, so nothing depends on receiving every report. The thread that reports ends
when nothing changes. ``mesh.traffic()`` asks all ranks (`ReadMeters`), because any process may have counted; ranks answer
during any work. The controller keeps the counts of each process, and the rates of the last minute.

A rank counts its collectives, too (`train.process_group.collective_counts`), by kind, process group and data path. What they
move counts in its throughput; `bandwidth` has the definitions.
"""
