"""What ``import monarch`` finds while tests of others run: the alias, with placeholders for private names."""

from __future__ import annotations

from upstream_placeholders import install

if __name__ == "monarch":
    install()
