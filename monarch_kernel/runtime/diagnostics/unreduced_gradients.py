"""Finds models in DistributedDataParallel whose last backward has left gradients unreduced.

This happens if a parameter gets no gradient, as where ranks take different branches of a model. torch raises an error in the
next forward only. Until then the gradients differ by rank, and the step of an optimizer makes the replicas differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableSet
from typing import Any

from monarch_kernel.runtime.diagnostics.torch_notes import torch_notes

__all__ = ["unreduced_text"]

_MODULE = "torch.nn.parallel.distributed"


def unreduced_text(namespace: Mapping[str, Any], known: MutableSet[Any]) -> str:
    """Describe the models among variables that have left gradients unreduced since the last call, in lines.

    Args:
        namespace: the variables.
        known: the models that have been described; this function keeps it.
    """
    kind = getattr(sys.modules.get(_MODULE), "DistributedDataParallel", None)
    if kind is None:
        return ""
    lines = []
    for name, value in list(namespace.items()):
        if not issubclass(type(value), kind):
            continue
        error = _unfinished(value)
        if error is None:
            known.discard(value)
        elif value not in known:
            known.add(value)
            notes = "".join(f"; {note}" for note in torch_notes(error))
            lines.append(
                f"{name}: its last backward has not reduced all gradients, which may differ by rank{notes}; use all parameters "
                "in the loss, or make it with find_unused_parameters=True"
            )
    return "\n".join(lines)


def _unfinished(model: Any) -> RuntimeError | None:
    """Return the error that torch raises about a model whose reduction has not ended."""
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        return error
    return None
