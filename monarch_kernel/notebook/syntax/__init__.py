"""Reads what the user typed: lines of magics, selectors, which cell is for ranks. Pure."""
