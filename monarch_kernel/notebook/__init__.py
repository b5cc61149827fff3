"""The Jupyter side: the kernel, magics, cells, output and views. Scripts work without it."""
