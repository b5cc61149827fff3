"""The kernel: ipykernel's, with what an extension can't do."""
