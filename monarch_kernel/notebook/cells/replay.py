"""Finds the earlier cells that a new process must run before a cell: those that define the names it needs. No I/O.

A cell needs the names that it reads before it binds them itself, according to its text. It depends on the earlier cells that
bind one of these names, and on the cells that those depend on. A call of a function that declares a name ``global`` binds it,
too. A cell that only changes an object (``model.eval()``) is not included: the snapshot has the state that training needs.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["cells_for", "reads"]


def cells_for(code: str, history: Sequence[str], transform: Callable[[str], str] = lambda code: code) -> list[int]:
    """Return the indices of the cells in the history, in order, that define the names which the code needs.

    Args:
        code: the code of a cell.
        history: the texts of the earlier cells that finished, the oldest first.
        transform: converts IPython's syntax into Python's.
    """
    texts: list[_Names] = []
    makers: dict[str, set[str]] = {}  # functions, and the names that each binds when it is called
    for text in (*history, code):
        names = _Names.of(text, transform)
        makers |= names.makers
        texts.append(names.with_calls(makers))
    of_code = texts.pop()
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


def reads(code: str, transform: Callable[[str], str] = lambda code: code) -> list[str]:
    """Return the names that code reads as it runs, before it binds them itself."""
    return sorted(_Names.of(code, transform).read - set(dir(builtins)))


class _Names(NamedTuple):
    """The names of the namespace that a cell reads and binds.

    Attributes:
        read: names that the cell reads as it runs, before it binds them itself.
        read_later: names that its functions read when they are called.
        bound: names that it binds.
        loaded: all names that it reads as it runs, also its own.
        makers: its functions that bind names of the namespace, with these names.
    """

    read: set[str]
    read_later: set[str]
    bound: set[str]
    loaded: set[str]
    makers: dict[str, set[str]]

    def with_calls(self, makers: Mapping[str, set[str]]) -> _Names:
        """Add the names that are bound by the functions that the cell reads as it runs."""
        called = [makers[name] for name in self.loaded if name in makers]
        return self._replace(bound=self.bound.union(*called))

    @classmethod
    def of(cls, code: str, transform: Callable[[str], str]) -> _Names:
        """Analyse a text; a text that is not valid Python has no names, as running it reports the error."""
        try:
            text = transform(code)
            tree = ast.parse(text)
            table = symtable.symtable(text, "cell", "exec")
        except (SyntaxError, ValueError):
            return cls(set(), set(), set(), set(), {})
        reader = _Reader()
        reader.visit(tree)
        makers = {child.get_name(): _declared_global(child) for child in table.get_children()}
        return cls(reader.read, _read_in_functions(table) - reader.bound, reader.bound, reader.loaded, makers)


class _Reader(ast.NodeVisitor):
    """Visits code in the order in which it would run, once through each branch and loop, and not into functions.

    Attributes:
        read: names that it loads before it binds them.
        loaded: all names that it loads.
        bound: all names that it binds.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.loaded: set[str] = set()
        self.bound: set[str] = set()
        self._local: set[str] = set()  # variables of comprehensions

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._load(node.id)
        else:
            self._bind(node.id)

    def _load(self, name: str) -> None:
        if name in self._local:
            return
        self.loaded.add(name)
        if name not in self.bound:
            self.read.add(name)

    def _bind(self, name: str | None) -> None:
        if name:
            self.bound.add(name)

    def _all(self, *nodes: ast.AST | Sequence[ast.AST | None] | None) -> None:
        for node in nodes:
            if isinstance(node, ast.AST):
                self.visit(node)
            else:
                self._all(*(each for each in node or () if each is not None))

    def visit_Assign(self, node: ast.Assign) -> None:
        self._all(node.value, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._all(node.value)
        if node.value is not None:
            self._all(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._load(node.target.id)
        self._all(node.value, node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._all(node.value, node.target)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._all(node.iter, node.target, node.body, node.orelse)

    visit_AsyncFor = visit_For

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._all(node.type)
        self._bind(node.name)
        self._all(node.body)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._bind((alias.asname or alias.name).partition(".")[0])

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._all(node.decorator_list, node.args.defaults, node.args.kw_defaults)
        self._bind(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._all(node.args.defaults, node.args.kw_defaults)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._all(node.decorator_list, node.bases, [each.value for each in node.keywords])
        body = _Reader()
        body._all(node.body)
        for name in body.read:
            self._load(name)
        self._bind(node.name)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        outside = self._local
        for part in node.generators:
            self._all(part.iter)
            self._local = self._local | {each.id for each in ast.walk(part.target) if isinstance(each, ast.Name)}
            self._all(part.ifs)
        self._all(*([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]))
        self._local = outside

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._all(node.pattern)
        self._bind(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._all(node.keys, node.patterns)
        self._bind(node.rest)


def _read_in_functions(table: symtable.SymbolTable) -> set[str]:
    """Return the names of the namespace that functions and classes of a cell read."""
    found: set[str] = set()
    for child in table.get_children():
        found |= {symbol.get_name() for symbol in child.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        found |= _read_in_functions(child)
    return found


def _declared_global(table: symtable.SymbolTable) -> set[str]:
    """Return the names of the namespace that a function, or a function nested in it, binds."""
    found = {each.get_name() for each in table.get_symbols() if each.is_declared_global() and each.is_assigned()}
    return found.union(*(_declared_global(child) for child in table.get_children()))
