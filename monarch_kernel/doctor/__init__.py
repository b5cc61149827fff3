"""``monarch-kernel doctor``: checks whether this environment has what the package needs, and says how to fix what is missing.

A check imports third-party packages, and modules of this package that need them, only when it runs: the doctor must still work
when a package is missing or broken.
"""
