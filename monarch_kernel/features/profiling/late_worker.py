"""The rank's part of late ranks: reports when it has started its last collectives, once a second."""

from __future__ import annotations

import threading
import time

from monarch_kernel.errors import ForkedError
from monarch_kernel.features.profiling.arrivals import ARRIVALS
from monarch_kernel.features.profiling.messages import Arrived
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["MAX_RANKS", "install"]

MAX_RANKS = 256
"""In larger meshes ranks do not report, because the controller would have too much to read."""

_REPORT_S = 1.0


@register
def install(rank: Rank) -> None:
    """Report while there are collectives. A rank without collectives has no thread for this."""
    if not 1 < rank.spec.world_size <= MAX_RANKS:
        return

    def report() -> None:
        while True:
            time.sleep(_REPORT_S)
            groups = ARRIVALS.take()
            if not groups:
                return
            try:
                rank.driver.submit(pack(Arrived(tuple(groups))))
            except ForkedError:
                return

    def begin() -> None:
        threading.Thread(target=report, name="monarch-late", daemon=True).start()

    ARRIVALS.on_news = begin
