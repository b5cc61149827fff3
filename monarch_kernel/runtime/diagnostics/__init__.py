"""Describes exceptions, stacks, values and namespaces of a rank in the user's terms, without running any of the user's code."""
