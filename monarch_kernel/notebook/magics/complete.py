"""Completes the lines of our magics (commands, options, names of meshes) and code that will run on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from monarch_kernel.launch.registry import ENGINES
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.magics.remote_names import RemoteNames
from monarch_kernel.notebook.syntax.options import COMMANDS, LOOP_ACTIONS, option_names, repeatable
from monarch_kernel.notebook.syntax.up_arguments import engine_of
from monarch_kernel.notebook.view.messages import narrow

__all__ = ["candidates", "make_matcher"]

_VALUES = {"--device": ["auto", "cpu", "cuda"], "--on": list(ENGINES), "--restart": ["never", "rank", "mesh"]}
_NAMES = ("--mesh",)
_MAX_KIND = 40


class _Final(list[SimpleCompletion]):
    """Completions that suppress the other matchers even if there are none: IPython checks their number first."""

    def __len__(self) -> int:
        return max(1, super().__len__())


def make_matcher(meshes: Meshes, remote: RemoteNames) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """Return a matcher for IPython's completer."""

    @context_matcher(identifier="monarch_kernel.base.mesh", priority=100)  # type: ignore[untyped-decorator]
    def match(context: CompletionContext) -> SimpleMatcherResult:
        text = context.text_until_cursor
        token = text.split()[-1] if text and not text[-1].isspace() else ""
        words = [
            (word, kind)
            for word, kind in candidates(text, meshes.names, meshes.detached.names)
            if word.startswith(token)
        ]
        found = remote.complete(context.full_text, _offset(context))
        if found is None:
            return {"completions": _made(words), "suppress": bool(words), "matched_fragment": token}
        both = dict([*(words if found.fragment == token else []), *found.matches])
        return {
            "completions": _Final(_made(both.items())),
            "suppress": True,
            "matched_fragment": found.fragment,
            "ordered": True,
        }

    return cast("Callable[[CompletionContext], SimpleMatcherResult]", match)


def _made(words: Iterable[tuple[str, str]]) -> list[SimpleCompletion]:
    return [SimpleCompletion(text=word, type=_shown(kind)) for word, kind in words]


def _shown(kind: str) -> str:
    """Return a kind that stays on one line: JupyterLab wraps it at spaces, over the next row, and makes the list too narrow."""
    return narrow(kind, _MAX_KIND).replace(" ", "\N{NO-BREAK SPACE}")


def _offset(context: CompletionContext) -> int:
    lines = context.full_text.split("\n")[: context.cursor_line]
    return sum(len(line) + 1 for line in lines) + context.cursor_position


def candidates(
    text: str, meshes: Sequence[str], detached: Callable[[], Sequence[str]] = tuple
) -> list[tuple[str, str]]:
    """Return the words that may complete a line, with their kinds; none if the line is not one of our magics."""
    words = text.split()
    if not words or words[0] not in ("%mesh", "%%remote", "%remote", "%autoremote") or text == words[0]:
        return []
    done = words[1:] if text[-1].isspace() else words[1:-1]
    partial = "" if text[-1].isspace() else words[-1]
    names = [(name, "mesh") for name in meshes]
    if done and done[-1] in _VALUES:
        return [(value, "value") for value in _VALUES[done[-1]]]
    if done and done[-1] in _NAMES:
        return names
    if words[0] == "%mesh":
        if not done:
            return [(command, "command") for command in COMMANDS]
        engine = engine_of(done) if done[0] == "up" else ""
        if options := option_names(f"%mesh {done[0]}", aliases=True, engine=engine):
            again = repeatable(f"%mesh {done[0]}", engine)
            left = [(option, "option") for option in options if option not in done or option in again]
            return left if done[0] == "up" else [*names, *left]
        if done[0] == "help":
            return [(command, "command") for command in COMMANDS]
        if done[0] == "loop":
            actions = [(word, "command") for word in LOOP_ACTIONS]
            return [] if set(done) & set(LOOP_ACTIONS) else [*(names if len(done) == 1 else []), *actions]
        if done[0] == "attach":
            return [(name, "mesh") for name in detached()]
        if done[0] == "down":
            names = [*names, *((name, "mesh") for name in detached() if name not in meshes), ("--all", "option")]
        if done[0] == "debug" and "--dap" not in done:
            names = [*(names if len(done) == 1 else []), ("--dap", "option")]
        if done[0] == "interrupt" and "--abort" not in done:
            names = [*(names if len(done) == 1 else []), ("--abort", "option")]
        return names if done[0] in COMMANDS else []
    options = option_names(words[0], aliases=True) if words[0] != "%remote" or partial.startswith("--") else []
    offered = [(option, "option") for option in options if option not in done]
    if words[0] == "%autoremote" and not done:
        offered.append(("off", "value"))
    return offered if done or partial.startswith("-") else [*names, *offered]
