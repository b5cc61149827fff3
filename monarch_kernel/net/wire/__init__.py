"""Messages and their encoding as bytes: no I/O, no clock."""
