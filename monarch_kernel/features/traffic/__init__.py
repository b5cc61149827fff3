"""What each rank sends and receives, by data path."""
