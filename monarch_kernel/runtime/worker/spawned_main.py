"""The ``__main__`` of a process that a cell of a rank has started by ``spawn`` or ``forkserver``; `spawned` explains it.

``multiprocessing`` runs this module as ``__mp_main__`` and then uses its variables as those of ``__main__``.
"""

from __future__ import annotations

import multiprocessing.process
from typing import Any

from monarch_kernel.runtime.worker.spawned import ATTRIBUTE, fill, give_definitions, missing

if __name__ == "__mp_main__":
    _names, _absent = fill(getattr(multiprocessing.process, ATTRIBUTE))
    give_definitions(lambda: _names)  # it may start further processes
    globals().update(_names)

    def __getattr__(name: str) -> Any:
        return missing(name, _absent)
