"""The processes of a session: the controller, host agents, ranks, and the requests between them.

Theory of operation
===================

::

    kernel or script    main: cells; monarch-controller: the loop, when the main thread does not wait;
     |                  monarch-view: cells in the background, late output, live tables
     `- host agent      one thread, one selector; no torch; never unpickles
         |- zygote      one thread; has imported torch; forks. A helper process for each start
         `- rank        main: cells; monarch-rank-io: the socket, when all other threads are busy;
                        monarch-actor-NAME: one thread per actor

Agent, zygote and ranks lead sessions of processes, so a terminal's or Jupyter's SIGINT does not reach them.

Start. `Session` makes a directory of mode 0700 with the ``ipc://`` socket of the controller, and a token. A launcher starts
the agent, which reads both from standard input and starts the zygote. A kernel does this when it starts, a script at
`this_host`. On other machines an engine starts the same agent (`launch.base`), which makes its own private directory. The
agent finds out what the controller does not know, such as GPUs and network interfaces, before it has ranks forked
(`runtime.host.resources`).

The zygote forks ranks through a helper, so that they become children of the agent. The kernel could not fork them: it has
threads and perhaps CUDA. New interpreters would import torch, which takes a second for each rank and shares no memory. A
rank waits until the helper is gone, asks the Linux kernel for SIGKILL when its parent ends, and sends `Hello` with the
token.

End. For each process another one notices the end, and needs no cooperation of the process that ends.
Deaths come from pidfds; only memory and processor use are polled, once a second.

- A mesh that the user stops: the agent sends SIGTERM, so ``atexit`` runs, and SIGKILL after ``grace_s``. When a rank has
  ended, for whatever reason, the agent ends the processes that the rank has started in the same way. ``stop`` resolves with
  the last `Lost` (`runtime.controller.exit_waits`).
- An actor: its own thread or loop. Its calls are cancelled and answered, and ``__cleanup__`` runs; at the end of the
  session within 2 s (`CleansUp`).
- A rank: the agent, by pidfd and ``waitid``. It sends the last output and then `Lost`. A `Failure` answers the pending
  requests.
- The controller: the agent, by `Goodbye` or the pidfd of the controller; on another machine by silence for
  `AgentConfig.grace_s`. It kills all ranks, closes the zygote and removes the directory. After `Detach` it keeps them and
  waits for `Attach`, for ``Detach.keep_s`` if that is limited.
- The agent: the Linux kernel kills the ranks, the zygote what they have started (`runtime.host.descendants`); on another
  machine the zygote also removes the directory. The controller marks all ranks as lost, and the next `this_host` launches
  another agent.
- A host elsewhere: the controller, by silence for ``lost_after_s``, or its engine. If the host sends again it receives
  the order to end (`Beat.over`).
- The zygote: the agent, by the end of its socket. Ranks that were not forked yet are lost, with the zygote's log. The agent
  starts another zygote.
"""
