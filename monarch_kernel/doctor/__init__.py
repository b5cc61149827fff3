"""What this environment has of all that the package needs, and what to do where something is missing.

Nothing outside the standard library is imported before a check needs it, our own modules that need others included: what is
missing or broken is just what is to be told.
"""
