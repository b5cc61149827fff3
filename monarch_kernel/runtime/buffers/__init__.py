"""Transfers of large values between processes: who serves them, and the data path that each takes."""
