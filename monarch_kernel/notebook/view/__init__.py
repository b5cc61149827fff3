"""Presents meshes to the user: their state as text, as HTML and as a live view, and errors of many ranks as text."""
