"""Extensions of meshes, such as live loops, code edits, debugging and widgets. Each feature is one folder.

Theory of operation
===================

The core (`runtime`) knows processes, requests and output, and no feature. A feature is a folder here: its part of the
controller, its part of a rank, what the program calls, and pure parts. It adds itself:

- `net.wire.codec.add_messages` lets its messages travel.
- `runtime.controller.extensions.register` adds an `Extension` to the state of each controller: handlers of its messages,
  what follows when a request has ended or a process is lost, what is due as time passes, and its part of a view.
- `runtime.worker.extensions.register` installs its part in each rank, which adds handlers there (`Rank.extend`).
  `bootstrap` imports that part before the first fork.
- `Runtime.extension` gives the controller's part to what the program calls, such as `LoopControl`.

`tests/features/toy.py` is a whole feature on one page.
"""
