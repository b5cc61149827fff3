"""The worker's side of actors: hosts the instance of an actor, its event loop and its responses."""
