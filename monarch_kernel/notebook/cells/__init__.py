"""Runs cells on ranks: queues and sends them, shows their output, interrupts and recovers them."""
