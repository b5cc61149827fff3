"""Small messages between processes of a host, and the thread that drives each socket."""
