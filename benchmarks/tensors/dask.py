"""Arrays of Dask, which are lazy."""

# The peer is optional, so its types may be missing.

from __future__ import annotations

from typing import Any

import dask.array
from distributed import Client, LocalCluster, wait

from benchmarks.tensors.work import WIDE, main, median_of, no_such


class Dask:
    """A cluster on this machine."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.cluster: Any = LocalCluster(n_workers=ranks, threads_per_worker=1, dashboard_address=None)
        self.client: Any = Client(self.cluster)

    def figure(self, name: str) -> float:
        """Take one figure."""
        if name != "matmul":
            raise no_such()
        arrays: Any = dask.array
        x = arrays.ones((WIDE, WIDE), chunks=(WIDE // self.ranks, WIDE), dtype="float32").persist()
        w = arrays.ones((WIDE, WIDE), chunks=(WIDE, WIDE), dtype="float32").persist()
        wait([x, w])
        self.client.replicate(self.client.futures_of(w))
        return 1e3 * median_of(lambda: float((x @ w).sum().compute()), 1)

    def stop(self) -> None:
        """End the cluster."""
        self.client.close()
        self.cluster.close()


# The workers are spawned by multiprocessing and import this file again.
if __name__ == "__main__":
    main(Dask)
