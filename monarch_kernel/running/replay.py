"""Which earlier cells made what a cell needs: those that a new process has to run before it; pure.

A cell needs the names that it reads before it has bound them itself, as far as its text tells; a cell that binds one of these
belongs to it, with all that it needs in turn. A cell that only changes what a name stands for (``model.eval()``) does not: what
of that matters to training is in its snapshot.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["cells_for"]


def cells_for(code: str, history: Sequence[str], transform: Callable[[str], str] = lambda code: code) -> list[int]:
    """The places of the cells in the history, in order, that made what the code needs.

    Args:
        code: of a cell.
        history: the texts of those before it that ran to their end, the oldest first.
        transform: turns IPython's syntax into Python's.
    """
    texts = [_Names.of(each, transform) for each in history]
    of_code = _Names.of(code, transform)
    found: set[int] = set()
    seen: set[tuple[str, int]] = set()
    wanted = [(name, len(texts)) for name in of_code.read | of_code.read_later]
    while wanted:
        name, before = wanted.pop()
        if (name, before) in seen:
            continue
        seen.add((name, before))
        at = next((i for i in range(before - 1, -1, -1) if name in texts[i].bound), None)
        if at is None:
            continue
        found.add(at)
        wanted += [(each, at) for each in texts[at].read]
        wanted += [(each, len(texts)) for each in texts[at].read_later]
    return sorted(found)


class _Names(NamedTuple):
    """The names of the namespace that a cell has to do with.

    Attributes:
        read: as it runs, before it has bound them itself.
        read_later: by its functions, when they are called.
        bound: by it.
    """

    read: set[str]
    read_later: set[str]
    bound: set[str]

    @classmethod
    def of(cls, code: str, transform: Callable[[str], str]) -> _Names:
        """Those of a text; none of one that is not Python, as whoever runs it says."""
        try:
            text = transform(code)
            tree = ast.parse(text)
            table = symtable.symtable(text, "cell", "exec")
        except (SyntaxError, ValueError):
            return cls(set(), set(), set())
        read: set[str] = set()
        bound: set[str] = set()
        for statement in tree.body:
            read |= _read_at_once(statement) - bound
            bound |= _bound_by(statement)
        known = set(dir(builtins))
        return cls(read - known, _read_in_functions(table) - bound - known, bound | _declared_global(table))


def _read_at_once(statement: ast.stmt) -> set[str]:
    """Names that a statement loads, those within functions left out."""
    found: set[str] = set()
    local: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            outside = [*node.args.defaults, *[each for each in node.args.kw_defaults if each is not None]]
            outside += getattr(node, "decorator_list", [])
            for each in outside:
                visit(each)
            return
        if isinstance(node, ast.comprehension):
            local.update(each.id for each in ast.walk(node.target) if isinstance(each, ast.Name))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(statement)
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        # Of a loop the names that it binds itself first; what it reads of them from before is told by its own cell.
        found -= _loop_targets(statement)
    return found - local


def _loop_targets(statement: ast.stmt) -> set[str]:
    targets = [node.target for node in ast.walk(statement) if isinstance(node, (ast.For, ast.AsyncFor))]
    targets += [
        item.optional_vars
        for node in ast.walk(statement)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars
    ]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _bound_by(statement: ast.stmt) -> set[str]:
    """Names that a statement binds in the cell's namespace."""
    found: set[str] = set()
    for node in _outside_functions(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ExceptHandler):
            found |= {node.name} if node.name else set()
    return found


def _outside_functions(node: ast.AST) -> list[ast.AST]:
    found = [node]
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            found += _outside_functions(child)
    return found


def _read_in_functions(table: symtable.SymbolTable) -> set[str]:
    """Names of the namespace that functions and classes of a cell read."""
    found: set[str] = set()
    for child in table.get_children():
        found |= {symbol.get_name() for symbol in child.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        found |= _read_in_functions(child)
    return found


def _declared_global(table: symtable.SymbolTable) -> set[str]:
    """Names that functions of a cell bind in the namespace."""
    found: set[str] = set()
    for child in table.get_children():
        found |= {
            symbol.get_name() for symbol in child.get_symbols() if symbol.is_declared_global() and symbol.is_assigned()
        }
        found |= _declared_global(child)
    return found
