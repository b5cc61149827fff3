"""Distributed tensors that endpoints of actors return: ``endpoint.rref(...)``."""

from __future__ import annotations

from typing import Any

from monarch_kernel.actor.actor_mesh import BoundEndpoint
from monarch_kernel.errors import Failure, RanksError
from monarch_kernel.features.tensors.messages import AbandonResult
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.tensor.calling import Callee, await_result
from monarch_kernel.tensor.device import device_of

__all__ = ["rref"]


def rref(endpoint: BoundEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an endpoint; see `BoundEndpoint.rref`."""
    device = device_of(endpoint.proc_mesh)
    runtime = device.mesh.runtime
    actor, name, propagate = endpoint.key
    number = device.stream.new_id()
    called = endpoint.begin_rref(number, args, kwargs)

    def check() -> None:
        """Let the ranks go on that wait for a call which did not reach its actor."""
        error = called.exception(0)
        reports = error.reports.values() if isinstance(error, RanksError) else ()
        failure = next(iter(reports), None) or Failure("stopped", type(error).__name__, str(error))
        if error is not None and not runtime.closed:
            runtime.tell(device.mesh.procs, pack(AbandonResult(number, failure)))

    called.add_done_callback(check)
    callee = Callee("monarch_kernel.features.tensors.results.receive", f"endpoint {name}()")
    return await_result(callee, device, number, (actor, name), args, kwargs, propagate or "cached")
