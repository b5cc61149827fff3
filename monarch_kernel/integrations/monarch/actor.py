"""``monarch.actor``: the names of `monarch_kernel.actor`, and further names of Monarch."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import NoReturn

import monarch_kernel.actor as native
from monarch_kernel.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Extent,
    Future,
    HostMesh,
    MeshFailure,
    Point,
    Port,
    PortReceiver,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    allocate,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    send,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch_kernel.actor.actor import Endpoint
from monarch_kernel.actor.context import ActorInstance, Context
from monarch_kernel.actor.spawning import BootstrapCommand, default_bootstrap_cmd
from monarch_kernel.integrations.monarch import config
from monarch_kernel.integrations.monarch.awaited import returns_future
from monarch_kernel.integrations.monarch.debugging import DebugController, debug_controller
from monarch_kernel.integrations.monarch.jobs import hosts_from_config
from monarch_kernel.integrations.monarch.missing import refuse
from monarch_kernel.integrations.monarch.ndslice import NDSlice, Shape
from monarch_kernel.integrations.monarch.telemetry import get_meter, get_tracer, span, traced
from monarch_kernel.integrations.monarch.transport import ChannelTransport, ProcId, Uid, enable_transport
from monarch_kernel.integrations.monarch.workers import (
    attach_to_workers,
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    start_worker_loop_forever,
)

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorInstance",
    "ActorMesh",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "DebugController",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "NDSlice",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "Shape",
    "SupervisionError",
    "Uid",
    "ValueMesh",
    "allocate",
    "as_endpoint",
    "attach_to_workers",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "get_tracer",
    "hosts_from_config",
    "returns_future",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",  # noqa: F822 - a property of the module
]


def current_actor_name() -> str:
    """Return the name of the running actor and its place in the mesh, such as ``trainers{'gpus': 1/4}``."""
    instance = context().actor_instance
    return f"{instance.name}{instance.rank}" if instance.rank.extent else instance.name


class _Module(types.ModuleType):
    """This module; its hook is that of `monarch_kernel.actor`, where it is read."""

    @property
    def unhandled_fault_hook(self) -> Callable[[MeshFailure], object]:
        """The function that is called with each failure that no actor handles; assign another one to replace it."""
        return native.unhandled_fault_hook

    @unhandled_fault_hook.setter
    def unhandled_fault_hook(self, hook: Callable[[MeshFailure], object]) -> None:
        native.unhandled_fault_hook = hook

    def __reduce__(self) -> tuple[Callable[[str], types.ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)  # cloudpickle knows plain modules only


sys.modules[__name__].__class__ = _Module


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.actor", name)
