"""What obtains hosts and starts an agent on each."""
