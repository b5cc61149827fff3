"""Process groups that C++ code gets in place of those of the user, so that the collectives that it starts in them are noted.

Theory of operation
===================

The reducer of DistributedDataParallel, and what broadcasts its parameters, get their process group from Python. They get a
group of a class in Python instead, whose methods start the same collectives in the group of the user, and note them. Torch
converts only the tensors and the options for it, which takes a third of the time of a kernel of its dispatcher (`operators`).

An all_reduce, which a backward pass has for each bucket, goes to the backend directly, where the operator of torch would do
nothing else. While a profile or a mode of torch looks at operators, it goes through the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["NotingGroups"]

_ALL_REDUCE = "allreduce"
_GIVEN_TO = ("_broadcast_coalesced", "_verify_params_across_processes")
"""Functions of C++ that start collectives in the group that is their first argument."""

_Note = Callable[[str, Any, Sequence[Any], float, Any], None]


class NotingGroups:
    """Gives such groups to C++ code, once it is installed.

    Args:
        note: is called when C++ has started a collective, with the method, the group of the user, the arguments, when it was
            started, by `time.perf_counter`, and torch's object for it.
        thread: its ``is_inside`` is true while a collective is started that ``note`` gets, so that no other code notes it.
    """

    def __init__(self, note: _Note, thread: Any) -> None:
        self._note = note
        self._thread = thread
        self._of: Callable[[Any], Any] = lambda group: group
        self._kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by reducer, which holds only the part in C++

    def install(self, dist: Any, methods: Iterable[str]) -> None:
        """Wrap what gives a process group to C++. Call this before the methods of process groups are wrapped.

        Args:
            dist: torch.distributed.
            methods: the methods of process groups that start collectives.
        """
        kind, noting = dist.ProcessGroup, _noting_class(dist, methods, self._note, self._thread)
        self._of = lambda group: (
            noting(group) if type(group) is kind else group
        )  # a class of the user calls Python itself
        dist.Reducer.__init__ = self._making(dist.Reducer.__init__)
        dist.Reducer._update_process_group = self._updating(dist.Reducer._update_process_group)
        for name in _GIVEN_TO:
            if (original := getattr(dist, name, None)) is not None:
                setattr(dist, name, self._giving(original))

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def __init__(reducer: Any, *args: Any, **kwargs: Any) -> None:
            given = list(map(self._of, args))
            named = {name: self._of(value) for name, value in kwargs.items()}
            original(reducer, *given, **named)
            made = [now for now, was in zip((*given, *named.values()), (*args, *kwargs.values())) if now is not was]
            self._kept[reducer] = made

        return __init__

    def _updating(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def update(reducer: Any, group: Any) -> None:
            made = self._of(group)
            original(reducer, made)
            self._kept[reducer] = [made]

        return update

    def _giving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(process_group: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self._of(process_group), *args, **kwargs)

        return call


def _noting_class(dist: Any, methods: Iterable[str], note: _Note, thread: Any) -> Any:
    """Define the class; its base needs torch."""
    import torch

    types = {name.lower(): each for name, each in dist.ProcessGroup.BackendType.__members__.items()}
    has_modes = torch._C._len_torch_dispatch_stack
    is_profiled = torch._C._autograd._profiler_enabled
    keeps_works = getattr(torch._C._distributed_c10d, "_allow_inflight_collective_as_graph_input", lambda: False)
    through_operator = _passing(_ALL_REDUCE, dist.ProcessGroup.allreduce, note, thread)

    class NotingGroup(dist.ProcessGroup):  # type: ignore[misc]
        """Starts collectives in another group, and notes them."""

        def __init__(self, group: Any) -> None:
            super().__init__(group.rank(), group.size())
            self._group = group
            backends = {str(each.type): group._get_backend(each) for each in group._device_types}
            for device, backend in backends.items():
                self._register_backend(torch.device(device), types.get(backend.name(), types["custom"]), backend)
            self._set_default_backend(types.get(group.name(), types["custom"]))
            self._on_cpu, self._on_gpu = backends.get("cpu"), backends.get("cuda")

        def allreduce(self, tensors: Sequence[Any], options: Any) -> Any:
            started = perf_counter()
            first = tensors[0]
            backend = self._on_cpu if first.is_cpu else self._on_gpu if first.is_cuda else None
            if backend is None or first.is_sparse or has_modes() or is_profiled() or keeps_works():
                return through_operator(self, tensors, options)
            work = backend.allreduce(tensors, options)
            note(_ALL_REDUCE, self._group, (tensors,), started, work)
            return work

    for name in methods:
        if name != _ALL_REDUCE and (original := getattr(dist.ProcessGroup, name, None)) is not None:
            setattr(NotingGroup, name, _passing(name, original, note, thread))
    return NotingGroup


def _passing(name: str, original: Callable[..., Any], note: _Note, thread: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        started = perf_counter()
        before, thread.is_inside = thread.is_inside, True
        try:
            work = original(self._group, *args)
        finally:
            thread.is_inside = before
        note(name, self._group, args, started, work)
        return work

    return method
