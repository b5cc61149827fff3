"""The notebook experience, for any IPython: magics, meshes by name, cells on ranks, completion, display."""
