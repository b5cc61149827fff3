"""The processes of a session: the controller, host agents, ranks, and the requests between them."""
