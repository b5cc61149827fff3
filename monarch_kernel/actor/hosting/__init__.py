"""An actor in its process: its instance, event loop, and responses."""
