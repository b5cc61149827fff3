"""Describes what is in a rank, in the user's terms: exceptions, stacks, values, namespaces. Runs none of the user's code."""
