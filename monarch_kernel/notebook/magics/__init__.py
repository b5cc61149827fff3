"""The magics, for any IPython: meshes by name, cells on ranks, completion, debugging and display of errors."""
