"""Merges the output of many ranks: equal lines and displays appear once, and floods are bounded. Pure."""
