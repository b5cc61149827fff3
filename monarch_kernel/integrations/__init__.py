"""Integrations: other frameworks that run on a mesh."""
