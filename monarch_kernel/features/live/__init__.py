"""Live loops: training loops on many ranks that a user pauses, steps, stops and tunes while they run.

Theory of operation
===================

A cell ``%mesh loop lr=1e-4`` goes from the magic (`notebook.magics.loops`) to the handle of the loop
(`features.live.handle`), to the controller's part, with the I/O lock held (`features.live.controller`), and to the pace
(`features.live.pace`), which gives a `LoopGrant` for each rank in the loop. The grant has a separate lane, because the main
thread is in the loop: the thread that drives the rank's socket notes it, and the loop applies it when the step comes
(`features.live.worker`). Pages use the same path.

Logged values come with the reports of ranks into curves (`features.live.curves`). Views have their last values; points go
to pages at most once a second.

Where the mesh outlives its controller, a loop that finds no controller runs freely. At `Attach` each rank says how far it
may have come (`LoopStarted.horizon`), and the new controller grants steps from the farthest of these on.
"""
