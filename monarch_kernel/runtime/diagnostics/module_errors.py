"""Describes a failure inside a model: which module failed, its inputs, and its parameters on this rank.

It reads only what modules and tensors store, and calls no code of the user. It does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from monarch_kernel.runtime.diagnostics.reprs import describe_value, describe_variable, is_tensor

__all__ = ["model_notes"]

_MAX_PARAMS = 6
_MAX_INPUTS = 6
_MAX_MODULES = 100_000
_PLAN = "_monarch_plan"
_MIXED = "mixed torch.Tensor and DTensor"


def model_notes(error: BaseException) -> tuple[str, ...]:
    """Return lines about the module whose forward failed; empty if the failure was in none."""
    calls = list(_module_calls(error.__traceback__))
    if not calls:
        return ()
    root = next((module for _, module in calls if _PLAN in vars(module)), calls[0][1])
    innermost = calls[-1][1]
    frames = [frame for frame, module in calls if module is innermost]
    frame = next((each for each in frames if each.f_code.co_name == "forward"), frames[-1])
    name = _name_in(root, innermost)
    kind = _kind(innermost)
    given = "; ".join(f"{key}: {describe_variable(key, value)}" for key, value in _arguments(frame))
    lines = [f"in {name} ({kind})" if name else f"in the forward of a {kind}"]
    lines[0] += f", called with {given}" if given else ""
    plan = vars(root).get(_PLAN)
    params = _parameters(innermost, name)
    is_mixed = _MIXED in str(error)
    if is_mixed:  # the parameters of a running unit are gathered
        below = (each for inner, module in _modules(innermost, name) for each in _parameters(module, inner))
        params = [(full, param) for full, param in below if hasattr(type(param), "to_local")]
    for full, param in params[:_MAX_PARAMS]:
        planned = f": {plan.about(full)}" if plan is not None else ""
        lines.append(f"  {full}: {describe_value(param)}{planned}")
    if is_mixed:
        named = f"replicate={[full for full, _ in params[:1]]!r}" if params else 'replicate=["…"]'
        lines += [
            "  a parameter that FSDP has sharded is used while its unit is not running: give parallelize an example= that",
            f"  takes this path, so that it finds the use, or keep the whole parameter on each rank: {named}",
        ]
    return tuple(lines)


def _module_calls(trace: TracebackType | None) -> Iterator[tuple[FrameType, Any]]:
    """Yield the frames of methods of modules with their modules, outermost first."""
    torch = sys.modules.get("torch")
    kind = getattr(getattr(torch, "nn", None), "Module", None)
    is_called = False
    while kind is not None and trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self")
        is_called = is_called or frame.f_code.co_name in (
            "_call_impl",
            "forward",
        )  # else a constructor, or another method
        if (
            is_called
            and issubclass(type(owner), kind)
            and frame.f_code.co_name
            not in (
                "_call_impl",
                "_wrapped_call_impl",
                "__init__",
            )
        ):
            yield frame, owner
        trace = trace.tb_next


def _name_in(root: Any, wanted: Any) -> str:
    """Return the full name of a module below a root; empty for the root itself, or if the module is not found."""
    return next((name for name, module in _modules(root, "") if module is wanted), "")


def _modules(root: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a module and all modules below it, with their full names."""
    pending: list[tuple[str, Any]] = [(name, root)]
    for _ in range(_MAX_MODULES):
        if not pending:
            return
        name, module = pending.pop()
        yield name, module
        children = vars(module).get("_modules") or {}
        pending += [(f"{name}.{key}" if name else key, child) for key, child in children.items() if child is not None]


def _kind(module: Any) -> str:
    """Return the name of the class as the user knows it: FSDP derives a new class from each."""
    kind = type(module)
    bases = [base for base in kind.__bases__ if base.__name__ != "FSDPModule"]
    return str(bases[0].__name__ if len(bases) < len(kind.__bases__) and bases else kind.__name__)


def _arguments(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the tensors among the arguments of a method, with the names of its parameters."""
    code = frame.f_code
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    found = [(name, frame.f_locals[name]) for name in names if name in frame.f_locals]
    yield from [(name, value) for name, value in found if is_tensor(value)][:_MAX_INPUTS]


def _parameters(module: Any, name: str) -> list[tuple[str, Any]]:
    """Return a module's own parameters with their full names."""
    stored = vars(module).get("_parameters") or {}
    return [(f"{name}.{key}" if name else key, param) for key, param in stored.items() if param is not None]
