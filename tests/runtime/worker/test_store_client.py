"""Operations on a store that are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as torch_distributed

from monarch_kernel.runtime.rpc.store_server import MAX_NBYTES
from monarch_kernel.runtime.worker.store_client import StoreClient


def test_a_value_that_no_store_takes_is_not_sent() -> None:
    nothing: Any = None  # a client that can't send
    with pytest.raises(
        torch_distributed.DistStoreError, match=r"set of k failed: .* may keep 256 MiB: send large values"
    ):
        StoreClient(nothing, 1, "s").ask("set", ["x//k"], [bytes(MAX_NBYTES + 1)], timeout_s=1)
