"""Parses what the user typed: lines of magics, selectors, and which cells run on ranks. No I/O."""
