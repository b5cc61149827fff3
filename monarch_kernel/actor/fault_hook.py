"""The call of the user's hook for failures that no actor handles."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TypeVar, cast

from monarch_kernel.errors import MeshFailure
from monarch_kernel.runtime.controller.unhandled import show_failure

__all__ = ["FaultHook", "call_fault_hook", "takes_groups"]

FaultHook = Callable[[MeshFailure], object]
HookT = TypeVar("HookT", bound=Callable[..., object])


def call_fault_hook(failure: MeshFailure) -> None:
    """Call the current ``monarch_kernel.actor.unhandled_fault_hook``; users can replace it.

    A hook of the user is called for each rank. The ranks whose failures arrive together differ from time to time.
    """
    hook = cast(FaultHook, sys.modules["monarch_kernel.actor"].unhandled_fault_hook)
    for each in [failure] if hook is show_failure or getattr(hook, "takes_groups", False) else failure.by_rank():
        _call(hook, each)


def takes_groups(hook: HookT) -> HookT:
    """Mark a hook that is called once for ranks that have failed together."""
    hook.takes_groups = True  # type: ignore[attr-defined]
    return hook


def _call(hook: FaultHook, failure: MeshFailure) -> None:
    try:
        hook(failure)
    except (
        BaseException
    ) as error:  # an error of the hook must not hide the failure, and SystemExit would end only this thread
        where = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, where))
        sys.stderr.write(f"unhandled_fault_hook failed:\n{text}It was called with this failure:\n")
        show_failure(failure)
