"""What is known where a logged value went wrong: the learning rate, the rows of the batch, and the module where it begins.

Theory of operation. A value is found to be wrong when a rank reports it, some steps later. The rows of each batch and logged
values are known by step. Optimizers and modules are those among the variables of the code that runs the loop. To find the
module whose output is not finite, all modules have a hook during the next step only, because hooks on all modules in all steps
would make steps slower, and wait for the device. If the parameters are not finite by then, the module with the first of them
is found.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user

__all__ = [
    "SCALER_PATIENCE",
    "FirstModule",
    "has_scaler",
    "is_learning_rate",
    "rates_text",
    "rows_text",
    "variables_of_caller",
]

_log = logging.getLogger(__name__)

_MAX_ROWS = 6
_MAX_MODULES = 10_000
_RATES = ("lr", "learning_rate")

SCALER_PATIENCE = 20
"""A GradScaler halves its scale in each step whose gradients are not finite; after so many in a row, that does not help."""


def is_learning_rate(name: str) -> bool:
    """Whether a logged value, or a knob, with this name is a learning rate."""
    return name.lower() in _RATES or name.lower().endswith(("/lr", "_lr", "/learning_rate"))


def variables_of_caller() -> dict[str, Any]:
    """Return the variables of the user's code that calls this: its globals, its locals, and the attributes of its ``self``."""
    frame = sys._getframe(1)
    while frame is not None and (is_machinery(frame.f_code.co_filename) or not is_user(frame)):
        if frame.f_back is None:
            return {}
        frame = frame.f_back
    found = {**frame.f_globals, **frame.f_locals}
    own = getattr(found.get("self"), "__dict__", {})
    return {**found, **{f"self.{name}": value for name, value in dict(own).items()}}


def has_scaler(variables: Mapping[str, Any]) -> bool:
    """Whether there is an enabled ``GradScaler`` among some variables."""
    amp = sys.modules.get("torch.amp.grad_scaler")
    return amp is not None and any(
        issubclass(type(each), amp.GradScaler) and each.is_enabled() for each in variables.values()
    )


def rates_text(variables: Mapping[str, Any]) -> str:
    """Return the learning rates of the optimizers among some variables, such as ``0.1 and 0.01``; empty if there are none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    optimizers = [each for each in variables.values() if isinstance(each, torch.optim.Optimizer)]
    rates = dict.fromkeys(float(group["lr"]) for each in optimizers for group in each.param_groups if "lr" in group)
    return " and ".join(f"{rate:.4g}" for rate in rates)


def rows_text(rows: Any) -> str:
    """Name the rows of a batch: ``rows 8 to 15``, ``rows 3, 17 and 4``; empty if they have no numbers."""
    if not isinstance(rows, Sequence):
        rows = [rows]
    if not rows or not all(isinstance(each, int) for each in rows):
        return ""
    if len(rows) == 1:
        return f"row {rows[0]}"
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return f"rows {rows[0]} to {rows[-1]}"
    if len(rows) <= _MAX_ROWS:
        return f"rows {', '.join(map(str, rows[:-1]))} and {rows[-1]}"
    return f"rows {', '.join(map(str, rows[:_MAX_ROWS]))} and {len(rows) - _MAX_ROWS} more"


class FirstModule:
    """Finds the first module whose output is not finite, although its inputs are, from now until `end`.

    Args:
        variables: the modules among these, by name, and their parts.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._found = ""
        self._hooks: list[Any] = []
        for name, module in _modules(variables):
            self._hooks.append(module.register_forward_hook(self._looking(name), with_kwargs=True))

    def end(self) -> str:
        """Look no more; returns what was found: ``net.2 (Linear), whose parameters are not finite``; empty if nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return self._found

    def _looking(self, name: str) -> Any:
        def look(module: Any, args: Any, kwargs: Any, result: Any) -> None:
            try:
                if not self._found and _is_first(args, kwargs, result):
                    self._found = f"{name} ({type(module).__name__})"
                    if not _all_finite(list(module.parameters(recurse=False))):
                        self._found += ", whose parameters are not finite"
            except Exception:  # the forward of the user's module must not fail
                _log.exception("could not look at the output of %s", name)

        return look


def _is_first(args: Any, kwargs: Any, result: Any) -> bool:
    return not _all_finite(result) and _all_finite((args, kwargs))


def _modules(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all modules among some variables and their parts, once, with their names."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    tops = {name: each for name, each in variables.items() if isinstance(each, torch.nn.Module)}
    parts = {id(part) for each in tops.values() for part in each.modules() if part is not each}
    seen: set[int] = set()
    for top, module in tops.items():
        if id(module) in parts:
            continue
        for name, part in module.named_modules():
            if id(part) not in seen and len(seen) < _MAX_MODULES:
                seen.add(id(part))
                yield f"{top}.{name}".rstrip("."), part


def _all_finite(tree: Any) -> bool:
    """Whether all numbers in the tensors of nested lists, tuples and dicts are finite."""
    torch = sys.modules["torch"]
    leaves = torch.utils._pytree.tree_leaves(tree)
    return all(_is_finite(each) for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point())


def _is_finite(tensor: Any) -> bool:
    local = getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor
    return bool(local.sum().isfinite()) or bool(local.isfinite().all())
