"""The worker of a rank: the process that runs the user's cells and actors."""
