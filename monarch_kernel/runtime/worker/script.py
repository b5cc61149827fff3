"""Runs a script in a rank that is up, as ``torchrun`` runs it in a new process; ``%mesh torchrun`` calls this.

The environment variables of torchrun are set on a rank before its first cell. A script that runs twice must find the same
things each time, so what scripts usually change in their process is restored afterwards: the arguments, the import path, the
environment, the working directory, the handlers of the root logger, torch's generator of random numbers, which starts as in a
new process, and the states that accelerate keeps for the process, which start empty. Modules beside the script are imported
again by the next run, so edits take effect.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from monarch_kernel.runtime.diagnostics.failures import starts_program

__all__ = ["run_script"]

_TORCH_SEED = 67280421310721
"""The seed of torch's default generator in a new process (``default_rng_seed_val``)."""


_STATES_OF_ACCELERATE = ("AcceleratorState", "GradientState", "PartialState")


@starts_program
def run_script(name: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run a script as the program of this process.

    Args:
        name: the path of the script, or the name of a module.
        arguments: its arguments.
        is_module: whether ``name`` is the name of a module, as for ``python -m``.

    Raises:
        RuntimeError: the script has called ``sys.exit`` with something other than 0.
        FileNotFoundError: there is no such script on this host.
        ModuleNotFoundError: there is no such module on this host.
    """
    gc.collect()  # models of an earlier run are in cycles with its functions
    main = types.ModuleType("__main__")
    with _restored(main):
        _choose_device()
        code = _load_module(main, name) if is_module else _load_script(main, name)
        sys.argv[:] = [main.__file__ or name, *arguments]
        try:
            exec(code, main.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                what = f"exit code {end.code}" if isinstance(end.code, int) else f"the message {end.code!r}"
                raise RuntimeError(f"{name} ended by sys.exit with {what}") from None


def _choose_device() -> None:
    """Let a script that takes the GPU with the number ``LOCAL_RANK`` find it: a rank sees one GPU, which has the number 0."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.device_count() == 1:
        os.environ["LOCAL_RANK"] = "0"


def _load_script(main: types.ModuleType, path: str) -> types.CodeType:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no script {path} on this host; it must be at the same path on all hosts")
    main.__file__ = path
    sys.path.insert(0, os.path.dirname(path))
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _load_module(main: types.ModuleType, name: str) -> types.CodeType:
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"there is no module {name} on this host that can be run", name=name)
    main.__file__, main.__spec__, main.__package__, main.__loader__ = spec.origin, spec, spec.parent, loader
    return code  # type: ignore[no-any-return]


@contextmanager
def _restored(main: types.ModuleType) -> Iterator[None]:
    """Let a module be the program meanwhile, and restore what scripts usually change in their process."""
    argv, path, environment, folder = list(sys.argv), list(sys.path), dict(os.environ), os.getcwd()
    handlers, level = list(logging.root.handlers), logging.root.level
    before, outer = set(sys.modules), sys.modules.get("__main__")
    torch = sys.modules.get("torch")
    state = torch.get_rng_state() if torch is not None else None
    found_by_accelerate = {name: dict(values) for name, values in _states_of_accelerate()}
    for _, values in _states_of_accelerate():
        values.clear()
    if torch is not None:
        torch.default_generator.manual_seed(_TORCH_SEED)
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        for name, values in _states_of_accelerate():
            values.clear()
            values.update(found_by_accelerate.get(name, {}))
        if outer is not None:
            sys.modules["__main__"] = outer
        if script := getattr(main, "__file__", None):
            _forget_modules(before, script)
        sys.argv[:], sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        if torch is not None:
            torch.set_rng_state(state)


def _states_of_accelerate() -> list[tuple[str, dict[str, Any]]]:
    """What the first ``Accelerator`` of a process has found, such as its process group; later ones do not look again."""
    module = sys.modules.get("accelerate.state")
    kinds: list[tuple[str, Any]] = [(name, getattr(module, name, None)) for name in _STATES_OF_ACCELERATE]
    return [(name, kind._shared_state) for name, kind in kinds if hasattr(kind, "_shared_state")]


def _forget_modules(before: set[str], script: str) -> None:
    """Forget the modules beside a script that were imported meanwhile, so that the next run imports them again."""
    folder = os.path.dirname(script) + os.sep
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(folder) and "site-packages" not in file:
            del sys.modules[name]
