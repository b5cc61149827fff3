"""Run records: what an interactive run executed, to compare it and to run it again.

``%mesh record runs/gpt`` writes one. ::

    from monarch_kernel import record

    r = record.open("runs/gpt")
    r.cells, r.knobs, r.metrics.to_pandas()
    r.replay(mesh, until_step=400)
    r.diff("runs/gpt-2")
    r.script("train.py")
    r.notebook("gpt.ipynb")
    r.parquet("metrics.parquet"), r.crate()
    r.send("mlflow", experiment="gpt")
"""

from __future__ import annotations

from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.differences import Difference, Differences
from monarch_kernel.train.record.mirroring import Mirror
from monarch_kernel.train.record.opened import Record, open
from monarch_kernel.train.record.replaying import Replay
from monarch_kernel.train.record.running import mirror, redact, start, status, stop

__all__ = [
    "Difference",
    "Differences",
    "Mirror",
    "Record",
    "RecordError",
    "Replay",
    "mirror",
    "open",
    "redact",
    "start",
    "status",
    "stop",
]
