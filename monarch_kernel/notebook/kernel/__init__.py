"""The kernel: ipykernel's, extended by what an IPython extension can't do."""
