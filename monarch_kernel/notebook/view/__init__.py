"""Faces of the meshes: the same state as text, as HTML and as a live view, and errors of many ranks as text."""
