"""The Jupyter side: the kernel, magics, cells, output, the view. Scripts work without it."""
