"""What one process asks of others: requests, the numbers they have, and what is not answered yet."""
