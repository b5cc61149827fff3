"""Cells on ranks, from their turn to their end: driven, shown, interrupted."""
