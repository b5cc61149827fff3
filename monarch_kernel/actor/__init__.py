"""Actors: write a class, spawn it on a mesh, call it.

The names are those of PyTorch Monarch's ``monarch.actor``.
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
from monarch_kernel.runtime.controller.unhandled import show_fault
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

unhandled_fault_hook: FaultHook = show_fault
"""Called with each failure that no actor has handled, one at a time and on a thread of its own; put your own in its place.

This one writes to stderr; in a notebook there is one that shows the failure in the cell that runs, or ran last.
"""
