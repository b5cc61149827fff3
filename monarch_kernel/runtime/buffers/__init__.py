"""Transfers of large values between processes: the server of lent memory, and the data path that each transfer takes."""
