"""Completes and describes names on ranks (Tab and Shift-Tab) in code that will run there.

Theory of operation. Ranks report their names after each cell, so names are known without asking; while a cell runs, a rank is
asked for the names that it has defined so far. For attributes, keys and arguments one rank is asked, an idle one if there is
one. A rank answers even while it runs code, unless native code holds its GIL. So a second rank is asked when the first one is
slow, and after `CAP_S` in total the last known answer is used. Names that the cell itself binds and imports are added, as they
are not on the ranks yet.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import MonarchError, format_ranks
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.messages import Complete, Inspect
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.syntax.cell_kind import IsMesh, code_at
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.options import parse_remote
from monarch_kernel.runtime.rpc.gather import PREDEFINED

__all__ = ["Completions", "RemoteCode", "RemoteNames", "kinds_on", "remote_code"]

CAP_S = 0.18
SECOND_AFTER_S = 0.09
_KEPT_ANSWERS = 200
_BRACKETS = r"\[(?:[^\[\]\n]|\[[^\[\]\n]*\])*\]"
_CHAIN = rf"(?:[^\W\d]\w*|\"[^\"\n]*\"|'[^'\n]*')(?:\.[^\W\d]\w*|{_BRACKETS})*"
_ATTRIBUTE = re.compile(rf"(?<![\w.])({_CHAIN})\.((?:[^\W\d]\w*)?)$")
_QUOTABLE = re.compile(r"[^\"'\\]*")  # else the text of a key would end its string, and begin code
_KEY = re.compile(rf"(?<![\w.])({_CHAIN})\[\s*(?:([\"'])([^\"'\]\n]*)|(\d*))$")
_VARIABLE = re.compile(r"[^\W\d]\w*")
_NAME = re.compile(r"(?<![\w.])((?:[^\W\d]\w*)?)$")
_CALL = re.compile(rf"(?<![\w.])({_CHAIN})\($")
_ASSIGNED = re.compile(r"[ \t]*[\w \t,.]+=[ \t]*(?=%remote\b)")
_NOT_PYTHON = re.compile(r"^\s*(?:[%!]|(?:import|from)\s)|\\\S*$")
_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+import\s+(?:[\w\s]+,)*\s*(\w*)$")
_BOUND = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?(def|class)[ \t]+(\w+)"
    r"|((?:\w+[ \t]*,[ \t]*)*\w+)[ \t]*(?::[^=\n]+)?=(?!=)"
    r"|(?:async[ \t]+)?for[ \t]+([\w \t,]+?)[ \t]+in\b"
    r"|(?:async[ \t]+)?with\b.*?\bas[ \t]+(\w+))",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^[ \t]*((?:import|from)[ \t].*)$", re.MULTILINE)


@dataclass(frozen=True)
class RemoteCode:
    """Code that will run on ranks.

    Attributes:
        selector: expression that selects the mesh.
        targets: which of its ranks; empty for all.
        code: the code.
        cursor: offset of the cursor in the code.
    """

    selector: str
    targets: str
    code: str
    cursor: int

    @property
    def before(self) -> str:
        """The line up to the cursor."""
        return self.code[: self.cursor].rpartition("\n")[2]


def remote_code(text: str, cursor: int, is_mesh: IsMesh, autoremote: str | None = None) -> RemoteCode | None:
    """Find the code around the cursor that will run on ranks; None if it will run here.

    Args:
        text: the whole cell.
        cursor: an offset into it.
        is_mesh: whether a variable is a mesh.
        autoremote: the arguments of ``%autoremote``, if it is on.
    """
    if assigned := _ASSIGNED.match(text, text.rfind("\n", 0, cursor) + 1):  # for code_at
        text, cursor = text[assigned.end() :].partition("\n")[0], cursor - assigned.end()
    form = code_at(text, cursor, autoremote, is_mesh) if cursor >= 0 else None
    if form is None:
        return None
    code, options = form.body, form.line
    if form.why == "%remote":
        code, options = text[form.start :].partition("\n")[0], form.line.removesuffix(form.body)
    try:
        targets = parse_remote(options).targets
    except UsageProblem:  # the line is still being typed
        targets = ""
    return RemoteCode(form.selector, targets, code, cursor - form.start)


@dataclass(frozen=True)
class Completions:
    """Completions at the cursor.

    Attributes:
        fragment: the text before the cursor that they replace.
        matches: (text, kind) in the order in which to offer them.
    """

    fragment: str
    matches: Sequence[tuple[str, str]]


class RemoteNames:
    """Completes and describes names on ranks.

    Args:
        meshes: the meshes of the notebook.
        namespace: the notebook's variables, among which are meshes.
        mode: returns the arguments of ``%autoremote``, if it is on.
    """

    def __init__(self, meshes: Meshes, namespace: Mapping[str, Any], mode: Callable[[], str | None]) -> None:
        self._meshes = meshes
        self._mode = mode
        self._namespace = namespace
        self._answers: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def locate(self, text: str, cursor: int) -> tuple[RemoteCode, ProcMesh] | None:
        """Find the code around the cursor that will run on ranks, and their mesh."""
        code = remote_code(text, cursor, lambda name: self._meshes.is_mesh(name, self._namespace), self._mode())
        if code is None:
            return None
        try:
            return code, self._meshes.find(code.selector, self._namespace, code.targets)
        except UsageProblem:
            return None

    def complete(self, text: str, cursor: int) -> Completions | None:
        """Return the completions at the cursor; None if ranks have nothing to say about them."""
        located = self.locate(text, cursor)
        if located is None:
            return None
        code, mesh = located
        if origin := _FROM.search(code.before):  # other matchers complete a module that ranks have not loaded
            answer = self._ask(mesh, "attributes", "module", {"module": origin[1]})
            return _matching(answer, origin[2]) if answer else None
        if _NOT_PYTHON.search(code.before):
            return None
        imports = _imports(code.code)
        if key := _KEY.search(code.before):
            expression, quote, written, digits = key.groups()
            answer = self._ask(mesh, "keys", expression, imports)
            if answer or quote:
                return _keys(answer or [], quote, written or digits or "")
        if text := _in_text(code.before):
            return Completions("", []) if text == "#" else None
        if attribute := _ATTRIBUTE.search(code.before):
            expression, written = attribute.groups()
            wanted = "private attributes" if written.startswith("_") else "attributes"
            return _matching(self._ask(mesh, wanted, expression, imports) or [], written)
        if name := _NAME.search(code.before):
            known = _merged(
                self._arguments(mesh, code, imports),
                (kinds_on(mesh) or PREDEFINED).items(),
                self._of_running_cell(mesh),
                _bound(code.code, imports),
                _builtin_names(),
            )
            return _matching(known, name[1])
        return None

    def describe(self, mesh: ProcMesh, expression: str, code: str, *, source: bool) -> dict[str, str] | None:
        """Describe an expression on ranks: title -> text; None if nothing is known about it."""
        imports = _imports(code)
        answered = self._ask_first(mesh, expression, lambda id: Inspect(id, expression, source, imports))
        if answered is None or answered[1] is None:
            return None
        rank, about = answered
        return {**about, "Ranks": _where(mesh, expression, rank, about.get("Value", ""))}

    def inspect(self, text: str, cursor: int, detail: int) -> dict[str, str] | None:
        """Describe the name at the cursor, or the function whose call surrounds it.

        Returns:
            Title -> text; empty if nothing is known. None if the code will not run on ranks.
        """
        located = self.locate(text, cursor)
        if located is None:
            return None
        code, mesh = located
        name = token_at_cursor(code.code, code.cursor)
        return (self.describe(mesh, name, code.code, source=detail > 0) if name else None) or {}

    def _of_running_cell(self, mesh: ProcMesh) -> list[tuple[str, str]]:
        """Ask for the names of a rank that runs a cell, as it reports them only at the end of the cell."""
        ranks = _best_ranks(mesh)
        running = [rank.rank for rank in mesh.view().ranks if rank.state == "running"]
        if not ranks or ranks[0] not in running:
            return []
        return self._ask(mesh, "names", "", {}) or []

    def _arguments(self, mesh: ProcMesh, code: RemoteCode, imports: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return the arguments of the call around the cursor, without those that are written already."""
        before = code.code[: code.cursor]
        opening = _open_bracket(before)
        call = _CALL.search(before[: opening + 1]) if opening >= 0 else None
        if call is None or keyword.iskeyword(call[1]):
            return []
        written = set(re.findall(r"(\w+)\s*=(?!=)", before[opening:]))
        answer = self._ask(mesh, "arguments", call[1], imports) or []
        return [(text, kind) for text, kind in answer if text[:-1] not in written]

    def _ask(self, mesh: ProcMesh, wanted: Any, expression: str, imports: Mapping[str, str]) -> Any:
        """Ask a rank; return the last known answer if it takes too long."""
        about = (mesh.name, mesh.procs, wanted, expression)
        answered = self._ask_first(mesh, expression, lambda id: Complete(id, wanted, expression, dict(imports)))
        if answered is None:
            return self._answers.get(about)
        self._answers[about] = answered[1]
        while len(self._answers) > _KEPT_ANSWERS:
            self._answers.popitem(last=False)
        return answered[1]

    def _ask_first(
        self, mesh: ProcMesh, expression: str, make: Callable[[int], Complete | Inspect]
    ) -> tuple[int, Any] | None:
        """Ask a rank, and a second one if the first is slow; return the rank that answered, and its answer."""
        deadline = time.monotonic() + CAP_S
        futures: dict[int, Any] = {}
        waiter = Waiter()
        try:
            for rank in _best_ranks(mesh, expression)[:2]:
                futures[rank] = mesh.look(rank, make)
                futures[rank].add_done_callback(waiter.set)
                if mesh.runtime.wait(waiter, SECOND_AFTER_S):
                    break
            if futures:
                mesh.runtime.wait(waiter, max(0.0, deadline - time.monotonic()))
            return next(((rank, future.get(0)) for rank, future in futures.items() if future.done()), None)
        except MonarchError:  # the mesh, or the session, has just ended
            return None
        finally:
            for future in futures.values():
                if not future.done():
                    future.cancel()


def kinds_on(mesh: ProcMesh) -> dict[str, str]:
    """Return the names that any rank has, with the kind of each on the lowest rank that has it."""
    kinds: dict[str, str] = {}
    for names in mesh.names().values():
        kinds = {**names, **kinds}
    return kinds


def _best_ranks(mesh: ProcMesh, expression: str = "") -> list[int]:
    """Return the ranks that can answer: first those that have the expression's variable, and among equals idle ones first."""
    states = {rank.rank: rank.state for rank in mesh.view().ranks}
    idle = [rank for rank in mesh.ranks if states[rank] in ("idle", "failed")]
    ranks = idle + [rank for rank in mesh.ranks if states[rank] == "running"]
    names, variable = mesh.names(), _VARIABLE.match(expression)
    return sorted(ranks, key=lambda rank: variable is not None and variable[0] not in names[rank])


def _where(mesh: ProcMesh, expression: str, asked: int, value: str) -> str:
    """Describe which ranks have a variable, and where it is of another kind; for other expressions only the asked rank.

    If the kind does not determine the value, the text adds from which rank the value comes.
    """
    names = mesh.names()
    kinds = {rank: names[rank][expression] for rank in names if expression in names[rank]}
    if not kinds:
        return f"{format_ranks([asked])} was asked"
    if asked not in kinds:
        return format_ranks(kinds)
    groups: dict[str, list[int]] = {}
    for rank, kind in kinds.items():
        groups.setdefault(kind, []).append(rank)
    own = kinds[asked]
    others = [f"{kind} on {format_ranks(ranks)}" for kind, ranks in groups.items() if kind != own]
    missing = [rank for rank in names if rank not in kinds]
    others += [f"not on {format_ranks(missing)}"] if missing else []
    text = f"{own} on {format_ranks(groups[own])}, {', '.join(others)}" if others else format_ranks(kinds)
    is_of_one = value and not value.startswith(own) and len(groups[own]) > 1
    return f"{text}; the value is that of {format_ranks([asked])}" if is_of_one else text


# Parsing the text of a cell.


def _imports(code: str) -> dict[str, str]:
    """Return the names that a cell imports -> dotted paths."""
    found: dict[str, str] = {}
    for statement in _IMPORT.findall(code):
        try:
            body = ast.parse(statement.strip()).body
        except SyntaxError:  # incomplete
            continue
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.asname is not None
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if whole else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    found.pop("*", None)
    return found


def _bound(code: str, imports: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in imports:
        yield name, "module" if name == imports[name].rpartition(".")[2] and name.islower() else "import"
    for kind, defined, *others in _BOUND.findall(code):
        if defined:
            yield defined, "class" if kind == "class" else "function"
        for name in re.findall(r"[^\W\d]\w*", " ".join(others)):
            yield name, "variable"


def _builtin_names() -> Iterator[tuple[str, str]]:
    for name in keyword.kwlist:
        yield name, "keyword"
    for name, value in vars(builtins).items():
        yield name, "class" if isinstance(value, type) else "function" if callable(value) else "instance"


def _merged(*parts: Any) -> list[tuple[str, str]]:
    """Merge parts in order, each sorted; a name that several parts have keeps the kind of the first."""
    found: dict[str, str] = {}
    for part in parts:
        for text, kind in sorted(part):
            found.setdefault(text, kind)
    return list(found.items())


def _matching(known: Sequence[tuple[str, str]], written: str) -> Completions:
    hidden = not written.startswith("_")
    likely = (each for each in known if each[0].startswith(written) and each[0].isprintable())
    return Completions(written, [each for each in likely if not (hidden and each[0][:1] == "_")])


def _keys(answer: Sequence[tuple[str | int, str]], quote: str, written: str) -> Completions:
    found = []
    for key, kind in answer:
        text = str(key) if type(key) is int else key if quote else f'"{key}"'
        if (type(key) is int and quote) or (type(key) is str and not (key.isprintable() and _QUOTABLE.fullmatch(key))):
            continue
        if str(text).startswith(written):
            found.append((str(text), kind))
    return Completions(written, found)


def _in_text(line: str) -> str:
    """Return the quote or ``#`` of the string or comment in which a line ends, judged by this line alone; else empty."""
    quote = ""
    position = 0
    while position < len(line):
        character = line[position]
        if character == "\\":
            position += 1
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#":
            return character
        position += 1
    return quote


def _open_bracket(text: str) -> int:
    """Return the offset of the innermost open bracket at the end if it is a ``(``; else -1."""
    depth = 0
    for offset in range(len(text) - 1, max(-1, len(text) - 2_000), -1):
        if text[offset] in ")]}":
            depth += 1
        elif text[offset] in "([{":
            if depth == 0:
                return offset if text[offset] == "(" else -1
            depth -= 1
    return -1
