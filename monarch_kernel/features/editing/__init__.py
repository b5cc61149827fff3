"""Live code edits: changes classes and functions in place in running processes, and reloads modules."""
