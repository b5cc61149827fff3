"""No lock stays taken when an interrupt arrives while a thread takes it.

Python raises KeyboardInterrupt between bytecodes. ``with lock:`` has no such place between taking the lock and the block, if
the lock's methods are C code. ``lock.acquire()`` before a ``try`` has one, and so has ``with condition:``, because
`threading.Condition.__enter__` is Python code. So product code enters a lock by ``with``, and a condition by its lock.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import monarch_kernel

PACKAGE = Path(monarch_kernel.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def faults(source: str) -> list[str]:
    """The lines of a module that an interrupt may leave with a lock taken."""
    tree = ast.parse(source)
    conditions = set()
    found = []
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(value, ast.Call)
            and _name(value.func) == "Condition"
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            conditions |= {_name(target) for target in targets}
            if not value.args:
                found.append(f"line {node.lineno}: give the condition a lock with a name")
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            names = {_name(item.context_expr) for item in node.items}
            found += [f"line {node.lineno}: enter the lock of {name}" for name in sorted(names & conditions)]
    return found


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    "source",
    [
        "self._changed = threading.Condition()",
        "changed: Condition = Condition()",
        "self._lock = Lock()\nself._changed = Condition(self._lock)\nwith self._changed:\n    pass",
    ],
)
def test_a_condition_that_is_entered_itself_is_found(source: str) -> None:
    assert faults(source)


def test_a_condition_whose_lock_is_entered_is_right() -> None:
    assert not faults("lock = RLock()\nchanged = Condition(lock)\nwith lock:\n    changed.notify_all()")


def test_conditions_are_entered_by_their_locks() -> None:
    found = {str(path.relative_to(PACKAGE)): faults(path.read_text()) for path in MODULES}
    assert {path: lines for path, lines in found.items() if lines} == {}
