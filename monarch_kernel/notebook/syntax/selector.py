"""Evaluates selectors, the expressions that select the mesh of a cell, without running arbitrary code.

A selector may contain only names, indices and the algebra of meshes, so that a mistake such as ``%%remote t.stop()`` is refused
before it has any effect.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.base.mesh import Point, Shaped
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.syntax.lines import UsageProblem

__all__ = ["evaluate", "pick_ranks", "root_name"]

_ALGEBRA = frozenset({"flatten", "rename", "slice", "split"})
_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Mult: operator.mul,
    ast.Sub: operator.sub,
}


_NAME_AND_INDEX = re.compile(r"\s*(?P<name>[^\W\d]\w*)\s*\[(?P<index>.*)", re.DOTALL)
_NAMED_INDEX = re.compile(r"\s*(?P<axis>[^\W\d]\w*)\s*=\s*(?P<index>[^=:,]+|(?P<first>[^=:,]*):(?P<last>[^=:,]*))\s*")


def root_name(selector: str) -> str | None:
    """Return the variable with which a selector starts: ``t`` for ``t[0:2].slice(dp=0)``; None if there is no variable.

    A name before a bracket counts also where the rest is no Python, as in ``t[dp=0]``, so that errors are about this mesh.
    """
    try:
        node: ast.expr = ast.parse(selector.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        found = _NAME_AND_INDEX.match(selector)
        return found["name"] if found and not keyword.iskeyword(found["name"]) else None
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None


def evaluate(selector: str, namespace: Mapping[str, Any], example: str = "trainers") -> Any:
    """Return the mesh that a selector selects, or another object that its name refers to.

    Args:
        selector: names, ints, slices and lists as indices, ``.slice(...)`` and the rest of the mesh algebra.
        namespace: the user's variables.
        example: name of a mesh, for errors.

    Raises:
        UsageProblem: the selector contains anything else, or can't be applied; the text says what to write.
    """
    try:
        tree = ast.parse(selector.strip(), mode="eval").body
        return _Reader(selector, namespace, example).mesh(tree)
    except (SyntaxError, RecursionError):
        raise UsageProblem(_refusal(selector, example)) from None
    except UsageProblem:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageProblem(f"{selector}: {error}") from None


def _refusal(selector: str, example: str, part: str = "") -> str:
    if selector.strip().isdecimal():
        return f"{selector!r} is a number and selects no mesh; rank {selector} of {example} is {example}[{selector}]"
    name = root_name(selector) or example
    if meant := _by_axes(selector):
        return f"{selector!r} selects no mesh: an index has no names; write {meant}"
    because = f": {part} is not evaluated here" if part and part != selector.strip() else ""
    return (
        f"{selector!r} selects no mesh{because}; write a name and, if needed, a slice, such as "
        f"{name}[0:2] or {name}.slice(...)"
    )


def _by_axes(selector: str) -> str:
    """Return what ``t[dp=0, tp=0:2]`` means, ``t.slice(dp=0, tp=slice(0, 2))``; empty for anything else."""
    found = _NAME_AND_INDEX.fullmatch(selector.rstrip())
    if found is None or not found["index"].endswith("]"):
        return ""
    parts = [_NAMED_INDEX.fullmatch(part) for part in found["index"][:-1].split(",")]
    named = [
        f"{part['axis']}={part['index'].strip()}"
        if part["first"] is None
        else f"{part['axis']}=slice({part['first'].strip() or None}, {part['last'].strip() or None})"
        for part in parts
        if part is not None
    ]
    meant = f"{found['name']}.slice({', '.join(named)})"
    try:
        ast.parse(meant, mode="eval")
    except (SyntaxError, ValueError):
        return ""
    return meant if len(named) == len(parts) else ""


class _Reader:
    """Evaluates one selector."""

    def __init__(self, selector: str, namespace: Mapping[str, Any], example: str) -> None:
        self._selector = selector
        self._example = example
        self._namespace = namespace

    def _refuse(self, node: ast.AST) -> UsageProblem:
        return UsageProblem(_refusal(self._selector, self._example, ast.unparse(node)))

    def _variable(self, name: str) -> Any:
        if name not in self._namespace:
            raise UsageProblem(f"{self._selector}: there is no variable {name!r} in the kernel")
        return self._namespace[name]

    def mesh(self, node: ast.expr) -> Any:
        """Evaluate to a mesh, or to any object if the node is only a name."""
        if isinstance(node, ast.Name):
            return self._variable(node.id)
        if isinstance(node, ast.Subscript):
            return self._shaped(node.value)[self._index(node.slice)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ALGEBRA:
            named: dict[str, Any] = {}
            for keyword in node.keywords:
                if keyword.arg is None:
                    raise self._refuse(node)
                named[keyword.arg] = self._argument(keyword.value)
            method = getattr(self._shaped(node.func.value), node.func.attr)
            return method(*map(self._argument, node.args), **named)
        raise self._refuse(node)

    def _shaped(self, node: ast.expr) -> Any:
        value = self.mesh(node)
        if not isinstance(value, Shaped):
            raise UsageProblem(f"{self._selector}: {ast.unparse(node)} is a {type(value).__name__}, not a mesh")
        return value

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Slice):
            return self._slice(node.lower, node.upper, node.step)
        if isinstance(node, ast.Tuple):
            return tuple(map(self._index, node.elts))
        if isinstance(node, ast.List):
            return list(map(self._int, node.elts))
        if isinstance(node, ast.Name):
            return self._checked_index(node, self._variable(node.id))
        return self._int(node)

    def _checked_index(self, node: ast.Name, value: Any) -> Any:
        if isinstance(value, (int, slice, Point)) or (
            isinstance(value, (list, tuple)) and all(isinstance(each, (int, slice)) for each in value)
        ):
            return value
        raise UsageProblem(
            f"{self._selector}: {node.id} is a {type(value).__name__}; an index is an int, a slice or a list"
        )

    def _slice(self, *bounds: ast.expr | None) -> slice:
        return slice(*(None if bound is None else self._bound(bound) for bound in bounds))

    def _bound(self, node: ast.expr) -> int | None:
        return None if isinstance(node, ast.Constant) and node.value is None else self._int(node)

    def _int(self, node: ast.expr) -> int:
        value: Any = None
        if isinstance(node, ast.Constant):
            value = node.value
        elif isinstance(node, ast.Name):
            value = self._variable(node.id)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = -self._int(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            value = _ARITHMETIC[type(node.op)](self._int(node.left), self._int(node.right))
        if not isinstance(value, int):
            raise self._refuse(node)
        return value

    def _argument(self, node: ast.expr) -> Any:
        """Evaluate an argument of ``slice``, ``split``, ``flatten`` or ``rename``: an index, a name, or a tuple of names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(map(self._argument, node.elts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "slice":
            if node.keywords or not 1 <= len(node.args) <= 3:
                raise self._refuse(node)
            return slice(*map(self._bound, node.args))
        return self._index(node)


_SPAN = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")
_SLICE = re.compile(r"-?\d*:-?\d*(?::\d*)?")


def pick_ranks(targets: str, ranks: Sequence[int]) -> list[int]:
    """Return the indices, in a mesh with these ranks, of the ranks that ``--targets`` names.

    Ranks are numbered as in output: a slice of a mesh keeps the numbers of the whole mesh.

    Args:
        targets: ``0,2``, ``1-3`` (including 3), ``0:4:2`` (as Python slices), or several of these with commas.
        ranks: the ranks of the selected mesh.

    Raises:
        UsageProblem: the targets are not valid, or name a rank that does not exist.
    """
    place = {rank: i for i, rank in enumerate(ranks)}
    top = max(ranks) + 1
    wanted: list[int] = []
    for part in targets.strip("[]").split(","):
        part = part.strip()
        if span := _SPAN.fullmatch(part):
            first, last = int(span["first"]), int(span["last"] or span["first"])
            wanted += range(first, max(first, min(last, top)) + 1 if last >= first else first)
        elif _SLICE.fullmatch(part):
            bounds = [int(text) if text else None for text in part.split(":")]
            if bounds[2:] == [0]:
                raise UsageProblem(f"--targets {targets}: the step of a slice must be at least 1")
            wanted += [rank for rank in range(top)[slice(*bounds)] if rank in place]
        else:
            raise UsageProblem(f"--targets takes ranks, such as 0,2 or 1-3 or 0:4:2 or all, not {targets!r}")
    if missing := [rank for rank in wanted if rank not in place]:
        raise UsageProblem(f"--targets {targets}: there is no rank {missing[0]}; available: {format_ranks(ranks)}")
    if not wanted:
        raise UsageProblem(f"--targets {targets} selects no rank; available: {format_ranks(ranks)}")
    return [place[rank] for rank in dict.fromkeys(wanted)]
