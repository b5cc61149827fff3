"""Gives a changed checkpoint correct checksums, because checksums do not protect against deliberate changes."""

from __future__ import annotations

import json
from pathlib import Path

from monarch_kernel.train.checkpoint.checksums import CHECKSUMS, Part, checksum, dumped

__all__ = ["reseal"]

_ABOUT = "monarch.json"


def reseal(path: Path) -> None:
    """Compute the checksums of all files of a checkpoint again."""
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.name not in (CHECKSUMS, _ABOUT)}
    sums = dumped([{name: [Part(0, len(content), checksum(content))] for name, content in files.items()}])
    (path / CHECKSUMS).write_bytes(sums)
    about = json.loads((path / _ABOUT).read_text())
    del about["checksum"]
    body = json.dumps({**about, "checksums": checksum(sums)}).encode()
    (path / _ABOUT).write_bytes(body[:-1] + b', "checksum": "%s"}' % checksum(body).encode())
