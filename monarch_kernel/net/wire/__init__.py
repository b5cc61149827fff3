"""Messages and how they become bytes: no I/O, no clock."""
