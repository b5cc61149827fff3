"""Small messages between processes: who is connected to whom, and which thread drives a socket."""
