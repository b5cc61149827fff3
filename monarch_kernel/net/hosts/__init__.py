"""Connections between hosts: the socket of the controller, the relay of each host, and the handshakes of new connections."""
