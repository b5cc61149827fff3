"""pdb on ranks: code stops at a breakpoint or after an error, and the user answers its prompts in the notebook.

Each executor of a rank keeps the exception of its last request, with its frames, until the next request starts
(`Executor.kept`). `PostMortem` opens pdb on it, as a request of that executor. `DebugInput` overtakes queued requests, as
`Interrupt` does. One cell asks at a time, because cells of subshells share the channel of answers. If no user can answer,
the controller sends `SkipBreakpoint`, and the code goes on.
"""
