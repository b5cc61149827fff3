"""The single controller: its pure state, the loop that drives it, and the futures it hands out."""
