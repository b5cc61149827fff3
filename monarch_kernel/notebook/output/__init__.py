"""Output of many ranks as one: equal lines and displays once, floods bounded. Pure."""
