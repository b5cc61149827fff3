"""What to do about a name that is on the other side: defined in the notebook and used on ranks, or the other way round."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.describe.look import kind_of
from monarch_kernel.errors import RanksError, RemoteError
from monarch_kernel.mesh import Shaped
from monarch_kernel.notebook.meshes import Meshes
from monarch_kernel.ui.names import elsewhere_hint, pull_hint, push_hint

__all__ = ["MISUSE", "local_hint", "remote_hints", "show_plainly"]

MISUSE = (AttributeError, IndexError, KeyError, NameError, TimeoutError, TypeError, ValueError)
"""What our functions raise, besides errors of ours, where they refuse a call."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_IPYTHON = os.sep + os.path.join("IPython", "core") + os.sep

_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")


def remote_hints(error: RanksError, meshes: Meshes, namespace: Mapping[str, Any]) -> list[str]:
    """Hints for names that a cell did not find on its ranks, and that the notebook has, or other ranks."""
    if not isinstance(error, RemoteError):
        return []
    hints: dict[str, None] = {}
    for failure, _ in error.groups():
        missing = _NOT_DEFINED.match(failure.message) if failure.etype == "NameError" else None
        mesh = next((entry.mesh for entry in meshes if failure.pid in _pids(entry.mesh)), None)
        if missing is None or mesh is None or missing[1].startswith("_"):
            continue
        name = missing[1]
        having = [rank for rank, names in mesh.names().items() if name in names]
        if isinstance(namespace.get(name), Shaped):
            hints[f"{name} is a mesh: it is in this notebook only, ranks can't use it"] = None
        elif having:
            hints[elsewhere_hint(name, mesh.name, having)] = None
        elif name in namespace:
            hints[push_hint(name, kind_of(namespace[name]), mesh.name)] = None
    return list(hints)


def local_hint(error: NameError, meshes: Meshes) -> str:
    """A hint for a name that a local cell did not find, and that ranks have; empty if there is none."""
    missing = _NOT_DEFINED.match(str(error)) if type(error) is NameError else None
    if missing is None:
        return ""
    places = list(_places(missing[1], meshes))
    return pull_hint(missing[1], places) if places else ""


def show_plainly(
    shell: InteractiveShell, kind: type[BaseException], error: BaseException, tb: TracebackType, hint: str
) -> None:
    """Show an error as IPython does: down to the line that has called us, and with one more line at its end."""
    shown = _without_our_frames(tb)
    if hint or shown is not tb:

        def render() -> list[str]:
            lines = shell.InteractiveTB.structured_traceback(kind, error, shown)
            return [*lines, hint] if hint else lines

        error._render_traceback_ = render  # type: ignore[attr-defined]
    try:
        shell.showtraceback((kind, error, tb), running_compiled_code=True)
    finally:
        with suppress(AttributeError):
            del error._render_traceback_  # type: ignore[attr-defined]  # it holds the frames, by way of the traceback


def _without_our_frames(tb: TracebackType) -> TracebackType:
    """A traceback up to the line that has called us, if it ends in our code: the message says why we refuse the call.

    What a magic raises in this way is a fault of ours, and shown whole.
    """
    steps = []
    step: TracebackType | None = tb
    while step is not None:
        steps.append(step)
        step = step.tb_next
    files = [each.tb_frame.f_code.co_filename for each in steps]
    theirs = [i for i, file in enumerate(files) if not file.startswith(_OURS)]
    if not theirs or theirs[-1] == len(steps) - 1 or _IPYTHON in files[theirs[-1]]:
        return tb
    shown = None
    for each in reversed(steps[: theirs[-1] + 1]):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown or tb


def _pids(mesh: Any) -> Iterable[int]:
    return (rank.pid for rank in mesh.view().ranks)


def _places(name: str, meshes: Meshes) -> Iterator[tuple[str, list[int], bool]]:
    for entry in meshes:
        ranks = [rank for rank, names in entry.mesh.names().items() if name in names]
        if ranks:
            yield entry.mesh.name, ranks, len(ranks) == len(entry.mesh)
