"""Gives functions of torch the current default group, where Python has kept a former one as the default of an argument."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

__all__ = ["renew_default_groups"]

_MODULES = ("torch.distributed.nn.functional",)
"""Modules with functions such as ``def all_reduce(tensor, group=group.WORLD)``: Python evaluates that once, at the import."""


def renew_default_groups(dist: Any) -> None:
    """Replace former groups in the defaults of arguments, when the default group has been formed."""
    for name in _MODULES:
        for thing in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            while isinstance(thing, FunctionType):
                if any(isinstance(each, dist.ProcessGroup) for each in thing.__defaults__ or ()):
                    thing.__defaults__ = tuple(
                        dist.group.WORLD if isinstance(each, dist.ProcessGroup) else each
                        for each in thing.__defaults__ or ()
                    )
                thing = getattr(thing, "__wrapped__", None)
