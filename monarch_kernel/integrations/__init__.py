"""Other frameworks on a mesh."""
