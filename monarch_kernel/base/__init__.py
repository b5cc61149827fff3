"""Values that every part of the package uses: shapes of meshes, events, tables of text. No I/O."""
