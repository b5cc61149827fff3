"""What the ranks save and load for a program that drives them (`from_program`): states whose tensors are their own parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Given", "rest_of"]


@dataclass
class Given:
    """The state of an object of the program.

    Attributes:
        kind: ``module``, ``optimizer`` or ``state``, as in `states.States`.
        state: the state; on a rank it has the rank's parts.
        buffers: names of buffers of a module.
        is_distributed: a copy of ``state`` with True in place of distributed tensors, and False in place of all else.
    """

    kind: str
    state: Any
    buffers: tuple[str, ...] = ()
    is_distributed: Any = False
    loaded: Any = field(default=None, repr=False)

    def load_state_dict(self, state: Any) -> None:
        """Keep the state for the program."""
        self.loaded = rest_of(state, self.is_distributed)


def rest_of(state: Any, is_distributed: Any) -> Any:
    """Return a state with None in place of distributed tensors, which have been loaded in place."""
    if isinstance(state, Mapping) and isinstance(is_distributed, Mapping):
        return {key: rest_of(value, is_distributed.get(key, False)) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and isinstance(is_distributed, list) and len(state) == len(is_distributed):
        return [rest_of(value, mark) for value, mark in zip(state, is_distributed)]
    return None if is_distributed is True else state
