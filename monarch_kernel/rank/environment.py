"""What a new rank sets for itself, before any user code runs."""

from __future__ import annotations

import os
import sys

from monarch_kernel.wire.messages import RankSpec

__all__ = ["settle"]


def settle(spec: RankSpec) -> None:
    """Give this process, a fork of the zygote, the environment, directory, threads and randomness of its own."""
    os.environ.update(spec.env)
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads)).partition(",")[0]
    os.chdir(spec.cwd)
    sys.path[:] = spec.sys_path
    torch = sys.modules.get("torch")
    if torch is not None:  # its thread pool has read OMP_NUM_THREADS in the zygote already
        torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else spec.threads)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # as Python does for its own: else all ranks go on with the zygote's stream
