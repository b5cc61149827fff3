"""Who has spawned whom, and what follows when something fails; no I/O."""
