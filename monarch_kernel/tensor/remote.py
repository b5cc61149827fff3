"""Remote functions: functions of the program that ranks call on their parts of distributed tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.tensor.calling import WAYS, Callee, Propagate, call, call_for_value, device_for
from monarch_kernel.tensor.device import device_of
from monarch_kernel.tensor.on_mesh import active_device
from monarch_kernel.tensor.reading import fetched
from monarch_kernel.tensor.reductions import form_group

__all__ = ["RemoteFunction", "call_on_shard_and_fetch", "remote"]


class RemoteFunction:
    """A function that all ranks call, each with its own parts of the distributed tensors in the arguments.

    Args:
        function: The function, or its name, such as ``package.module.function``.
        propagate: As for `remote`.
    """

    def __init__(self, function: Callable[..., Any] | str, propagate: Propagate | None) -> None:
        if not callable(function) and not (isinstance(function, str) and "." in function):
            raise TypeError(f"remote() takes a function, or its name such as 'package.function', not {function!r}")
        if isinstance(propagate, str) and propagate not in WAYS:
            raise ValueError(f"propagate is a function or one of {', '.join(map(repr, WAYS))}, not {propagate!r}")
        name = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
        self._callee = Callee(function, name.replace("<locals>.", ""))
        self._propagate = propagate or "cached"
        if propagate == "mocked":
            if isinstance(function, str):
                raise ValueError("propagate='mocked' runs the function here on fake tensors: pass it, and not its name")
            self._propagate = function
        if callable(function):
            functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<remote {self._callee.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on all ranks that hold the tensors, or on those of the active mesh.

        Returns:
            The result, with a distributed tensor in place of each tensor. Other values in it are those of the first rank.

        Raises:
            TensorError: The arguments have no mesh, or several; or it has failed, where the call waits.
            PayloadError: An argument can't be sent.
        """
        return call(self._callee, self._device(args, kwargs), args, kwargs, self._propagate)

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Call it on all ranks, and return a future of what each rank has returned, with plain tensors."""
        device = self._device(args, kwargs)
        return fetched(device, device.mesh, call_for_value(self._callee, device, args, kwargs))

    def call_on(self, mesh: ProcMesh, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it on a mesh of one rank, and return a future of what it has returned, with plain tensors.

        Raises:
            ValueError: The mesh has several ranks.
        """
        if len(mesh) != 1:
            raise ValueError(f"call_on() takes a mesh of one rank, and {mesh!r} has {len(mesh)}")
        device = device_of(mesh)
        future = fetched(device, mesh, call_for_value(self._callee, device, args, kwargs), lambda found: found.item())
        return future

    def _device(self, args: Any, kwargs: Any) -> Any:
        device = device_for((args, kwargs), active_device(), f"remote function {self._callee.name}")
        if device.target.lost:
            device.refuse_lost()
        if device.mesh.size() > 1:
            form_group(device.mesh.whole)
        return device


@overload
def remote(function: Callable[..., Any] | str, *, propagate: Propagate | None = None) -> RemoteFunction: ...
@overload
def remote(
    function: None = None, *, propagate: Propagate | None = None
) -> Callable[[Callable[..., Any]], RemoteFunction]: ...
def remote(function: Callable[..., Any] | str | None = None, *, propagate: Propagate | None = None) -> Any:
    """Make a function of plain tensors one of distributed tensors, which all ranks call. Also a decorator.

    Names that the function uses and that are not defined here are variables of the rank's cells. It may use the process group.

    Args:
        function: A function, or the name of one that ranks can import.
        propagate: How the program knows the shapes of results. A function: it is called here on fake tensors, and returns
            tensors of these shapes. ``cached``, the default: the first call with tensors of these shapes waits for the ranks.
            ``inspect``: each call waits. ``mocked``: the function itself runs here on fake tensors.
    """
    if function is None:
        return functools.partial(remote, propagate=propagate)
    return function if isinstance(function, RemoteFunction) else RemoteFunction(function, propagate)


def call_on_shard_and_fetch(
    function: RemoteFunction | Callable[..., Any] | str, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
) -> Future[Any]:
    """Call a function on one rank, and return a future of its result.

    Args:
        function: A remote function, or one that becomes one.
        args: Its arguments.
        shard: The rank by axes of the mesh; axes that are left out count as 0.
        kwargs: Further arguments.
    """
    called = remote(function)
    mesh = called._device(args, kwargs).mesh
    place = mesh.slice(**{**dict.fromkeys(mesh.extent, 0), **(shard or {})})
    return called.call_on(place, *args, **kwargs)
