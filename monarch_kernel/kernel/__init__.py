"""The Jupyter side: the kernel, its magics, completion, and how output and errors of many ranks are shown."""
