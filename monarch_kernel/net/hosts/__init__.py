"""Connections between hosts: the socket of the controller, the relay of each host, and who may connect."""
