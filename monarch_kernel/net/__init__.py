"""How bytes travel between processes: messages, transports, connections between hosts, shared memory."""
