"""Actors: write a class, spawn it on a mesh, and call its endpoints.

The names match those of ``monarch.actor`` in PyTorch Monarch.
"""

from __future__ import annotations

from monarch_kernel.actor.actor import Actor, concurrent_endpoint, endpoint
from monarch_kernel.actor.actor_mesh import ActorMesh
from monarch_kernel.actor.calls import Accumulator, as_endpoint, send
from monarch_kernel.actor.channels import Channel, Port, PortReceiver
from monarch_kernel.actor.context import context, current_actor_name, current_rank, current_size
from monarch_kernel.actor.fault_hook import FaultHook
from monarch_kernel.actor.host_mesh import (
    HostMesh,
    allocate,
    get_or_spawn_controller,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import Extent, Point, ValueMesh
from monarch_kernel.errors import ActorError, MeshFailure, SupervisionError
from monarch_kernel.runtime.controller.unhandled import show_failure
from monarch_kernel.runtime.rpc.future import Future

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "Channel",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "SupervisionError",
    "ValueMesh",
    "allocate",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_spawn_controller",
    "send",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]

unhandled_fault_hook: FaultHook = show_failure
"""The function that is called with each failure that no actor handles. Assign another function to replace it.

Calls come one at a time, on a separate thread. The default writes to stderr. In a notebook, the default shows the failure in
the cell that is running or that ran last.
"""
