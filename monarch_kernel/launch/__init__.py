"""Launchers: obtain hosts from an engine (Ray, Slurm, Kubernetes ...) and start an agent on each."""
