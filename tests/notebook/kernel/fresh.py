"""Runs in a kernel that several test modules share: saves the state of the process, and restores it.

A test may change any of it; the next module finds the kernel as it was at its start.
"""

from __future__ import annotations

import builtins
import gc
import logging
import os
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["put_back", "remember"]

PRODUCT = "monarch_kernel"
CHECKOUT = Path(__file__).resolve().parents[3]

_undo: list[Callable[[], object]] = []


def remember(shell: Any) -> None:
    """Save the state of a kernel that no test has used yet."""
    cwd, path, environment, modules = os.getcwd(), list(sys.path), dict(os.environ), set(sys.modules)
    filters, handlers, level = list(warnings.filters), list(logging.root.handlers), logging.root.level
    hooks = sys.excepthook, threading.excepthook
    names = set(vars(builtins))
    callbacks = {event: list(found) for event, found in shell.events.callbacks.items()}
    transformers = shell.input_transformer_manager
    transforms = [
        (found, list(found))
        for found in (transformers.cleanup_transforms, transformers.line_transforms, transformers.token_transformers)
    ]
    product = _product()

    def undo() -> None:
        sys.settrace(None)
        os.chdir(cwd)
        sys.path[:] = path
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        for name in set(sys.modules) - modules:
            if _is_of_a_test(sys.modules[name]):
                del sys.modules[name]
        warnings.filters[:] = filters
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        logging.disable(logging.NOTSET)
        sys.excepthook, threading.excepthook = hooks
        for name in set(vars(builtins)) - names:
            delattr(builtins, name)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for event, found_callbacks in callbacks.items():
            shell.events.callbacks[event][:] = found_callbacks
        for kept, found_transforms in transforms:
            kept[:] = found_transforms
        for owner, name, value in product:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)

    _undo[:] = [undo]


def put_back(shell: Any) -> None:
    """Restore the state, delete all variables of tests, and make the next cell the first."""
    shell.run_line_magic("autoremote", "off")
    shell.run_line_magic("xmode", "Context")
    _undo[0]()
    shell.reset(new_session=True)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()


def _product() -> list[tuple[Any, str, object]]:
    """Find what tests may replace in the package: functions, classes, methods and constants, with their owners and names."""
    found: list[tuple[Any, str, object]] = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != PRODUCT:
            continue
        for name, value in list(vars(module).items()):
            is_constant = name.isupper() and isinstance(value, (int, float, str, tuple, frozenset, type(None)))
            if is_constant or isinstance(value, (FunctionType, MethodType, partial, type)):
                found.append((module, name, value))
            if isinstance(value, type) and value.__module__ == module_name:
                members = vars(value).items()
                found += [(value, name, member) for name, member in members if isinstance(member, FunctionType)]
    return found


def _is_of_a_test(module: ModuleType) -> bool:
    """Whether a module belongs neither to a library nor to this checkout."""
    file = getattr(module, "__file__", None)
    if not file:
        return False
    homes = [*(sysconfig.get_paths().values()), sys.base_prefix, str(CHECKOUT)]
    return not any(Path(file).is_relative_to(home) for home in homes)
