"""Programs that look at the meshes of a running kernel from another process: the command line, and a server for agents.

A client connects to the kernel as a panel of JupyterLab does, and gets the same frames (`notebook.view.frames`). It needs the
kernel's connection file, which is in Jupyter's runtime directory, belongs to the user with mode 0600, and has the key that
signs messages. Nothing else listens.
"""
