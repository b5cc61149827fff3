"""Imports go down the layers, never up or sideways; there is no cycle; a third party stays behind its folder."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "monarch_kernel"
ROOT = Path(__file__).parents[1] / PACKAGE

# Low to high. What stands on one line does not import each other.
LAYERS = (
    ("errors", "events", "own_log", "tables"),
    ("mesh", "plan", "traffic"),
    ("wire",),
    ("data",),
    ("transport", "supervise", "steer"),
    ("asking",),
    ("launch", "agent", "describe", "live"),
    ("edit",),
    ("rank",),
    ("controller", "reshard"),
    ("actor", "together"),
    ("parallel", "train", "rdma", "spmd", "doctor"),
    ("checkpoint", "snapshots", "ui", "output", "syntax"),
    ("running",),
    ("lightning",),
    ("notebook", "testing"),
    ("kernel",),
    ("bootstrap", "cli"),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS)  # the root's __init__: may reach anything, lazily

# Third party -> who may import it: a folder, or one module of it.
BEHIND = {
    "IPython": ("kernel", "notebook", "running", "rank.cell", "rank.shell"),
    "anywidget": ("ui",),
    "asyncssh": ("launch.ssh",),
    "cryptography": ("transport.streams",),
    "ipykernel": ("kernel",),
    "ipywidgets": ("ui",),
    "kubernetes": ("launch.kubernetes",),
    "lightning": ("lightning.unified",),
    "lightning_fabric": ("lightning.standalone",),
    "lightning_sdk": ("launch.lightning",),
    "msgspec": ("wire", "transport.sharing"),
    "pytorch_lightning": ("lightning.standalone",),
    "ray": ("launch.ray",),
    "safetensors": ("checkpoint.exporting",),
    "tensorboard": ("controller.tensorboard",),
    "torch": (
        "checkpoint",
        "data.devices",
        "lightning",
        "parallel",
        "rank",
        "reshard",
        "snapshots.captured",
        "spmd",
        "train",
        "together",
        "wire.tensors",
    ),
    "zmq": ("transport",),
}
# Loading torch takes a second, and these are also imported where it is not needed.
ONLY_IN_FUNCTIONS = {
    ("kubernetes", "launch"),
    ("lightning_sdk", "launch"),
    ("torch", "data"),
    ("torch", "lightning"),
    ("torch", "rank"),
    ("torch", "reshard"),
    ("torch", "spmd"),
    ("torch", "train"),
    ("torch", "wire"),
}


@dataclass(frozen=True)
class Import:
    """One import: ``target`` is a dotted name, ``lazy`` if it happens in a function or is for type checkers only."""

    target: str
    line: int
    lazy: bool


def imports_of(module: str, source: str, *, package: bool, known: frozenset[str]) -> Iterator[Import]:
    """Yield what a module imports, anywhere in it; a name imported from a package counts as the module it denotes."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if package else module.split(".")[:-1]
                base = ".".join(here[: len(here) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield Import(name if name in known else base, node.lineno, lazy)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, lazy)
        else:
            inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def violations(sources: dict[str, str], packages: frozenset[str]) -> list[str]:
    """Name every import that breaks a rule.

    Args:
        sources: dotted name -> source, of every module of the package.
        packages: those names that are packages.
    """
    known = frozenset(sources)
    found: list[str] = []
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        part = module.split(".")[1] if "." in module else ""
        if part and part not in LEVEL:
            found.append(f"{module}: {part} is in no layer")
            continue
        level = LEVEL[part] if part else TOP
        for item in imports_of(module, source, package=module in packages, known=known):
            where = f"{module}:{item.line}"
            top, _, rest = item.target.partition(".")
            if top != PACKAGE:
                found.extend(f"{where}: {problem}" for problem in third_party(module, part, top, item))
                continue
            target = rest.partition(".")[0]
            if part and target != part and LEVEL.get(target, TOP) >= level:
                found.append(f"{where}: imports {item.target}, which is not in a lower layer")
            if not part and not item.lazy and target and LEVEL.get(target, TOP) > LEVEL["actor"]:
                found.append(f"{where}: imports {item.target} eagerly")
            # The root re-exports lazily, so it is part of no cycle.
            if part and item.target in known and item.target != module:
                graph[module].add(item.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("import cycle: " + " -> ".join(reversed(error.args[1])))
    return found


def third_party(module: str, part: str, top: str, item: Import) -> Iterator[str]:
    """Yield what is wrong with an import of something that is not ours."""
    if top not in BEHIND or (not part and item.lazy):
        return
    inner = module.partition(".")[2]
    if not any(inner == allowed or inner.startswith(allowed + ".") for allowed in BEHIND[top]):
        yield f"imports {top}, which stays in {' and '.join(BEHIND[top])}"
    elif (top, part) in ONLY_IN_FUNCTIONS and not item.lazy:
        yield f"imports {top} outside a function"


def read_package() -> tuple[dict[str, str], frozenset[str]]:
    """Read the sources of the package, and tell which of its modules are packages."""
    sources, packages = {}, set()
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
            packages.add(".".join(parts))
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources, frozenset(packages)


def test_imports_go_down() -> None:
    sources, packages = read_package()
    assert len(sources) > 5
    found = violations(sources, packages)
    assert not found, "\n".join(found)


def missing(modules: frozenset[str], layers: Iterable[str], behind: Iterable[str], lazy: Iterable[str]) -> list[str]:
    """Name what the tables name but the package does not have, and what the package has but no layer names."""
    inner = {module.partition(".")[2] for module in modules} - {""}
    parts = {module.partition(".")[0] for module in inner}
    return [
        *(f"LAYERS: {name} does not exist" for name in sorted(set(layers) - parts)),
        *(f"LAYERS: {name} is missing" for name in sorted(parts - set(layers))),
        *(f"BEHIND: {name} does not exist" for name in sorted(set(behind) - inner)),
        *(f"ONLY_IN_FUNCTIONS: {name} does not exist" for name in sorted(set(lazy) - parts)),
    ]


def test_each_name_in_the_tables_exists() -> None:
    names = [name for names in LAYERS for name in names]
    assert len(names) == len(LEVEL), "a name is in two layers"
    allowed = [name for names in BEHIND.values() for name in names]
    assert missing(frozenset(read_package()[0]), names, allowed, [part for _, part in ONLY_IN_FUNCTIONS]) == []
    assert {library for library, _ in ONLY_IN_FUNCTIONS} <= BEHIND.keys()


def test_names_that_do_not_exist_are_reported() -> None:
    modules = frozenset({"monarch_kernel", "monarch_kernel.a", "monarch_kernel.a.b", "monarch_kernel.c"})
    assert missing(modules, ["a", "c"], ["a", "a.b"], ["a"]) == []
    assert missing(modules, ["a", "d"], ["a.c", "e"], ["b"]) == [
        "LAYERS: d does not exist",
        "LAYERS: c is missing",
        "BEHIND: a.c does not exist",
        "BEHIND: e does not exist",
        "ONLY_IN_FUNCTIONS: b does not exist",
    ]


def test_no_folder_inside_a_folder_but_those_of_engines() -> None:
    paths = [p.relative_to(ROOT) for p in ROOT.rglob("*.py")]
    assert not [str(p) for p in paths if len(p.parts) > (3 if p.parts[0] == "launch" else 2)]


BROKEN = {
    "upward": ("monarch_kernel.mesh.shape", "import monarch_kernel.actor.actor", "not in a lower layer"),
    "upward in a function": (
        "monarch_kernel.wire.codec",
        "def f():\n    from monarch_kernel.controller import state",
        "not in a lower layer",
    ),
    "upward for type checkers": (
        "monarch_kernel.wire.codec",
        "if TYPE_CHECKING:\n    from monarch_kernel.actor.actor import Actor",
        "not in a lower layer",
    ),
    "sideways": ("monarch_kernel.data.roads", "from ..transport import zmq", "not in a lower layer"),
    "the root": ("monarch_kernel.mesh.shape", "from monarch_kernel import Actor", "not in a lower layer"),
    "the root, relative": ("monarch_kernel.mesh.shape", "from .. import actor", "not in a lower layer"),
    "zmq": ("monarch_kernel.controller.state", "import zmq.asyncio", "imports zmq"),
    "torch eagerly": ("monarch_kernel.rank.rank", "import torch", "outside a function"),
    "torch elsewhere": ("monarch_kernel.data.roads", "def f():\n    import torch", "imports torch"),
    "IPython in a rank": ("monarch_kernel.rank.rank", "from IPython.core import x", "imports IPython"),
    "ipykernel by the root": ("monarch_kernel", "import ipykernel", "imports ipykernel"),
    "kernel by the root": ("monarch_kernel", "from monarch_kernel.kernel import app", "eagerly"),
    "no layer": ("monarch_kernel.utils", "", "in no layer"),
    "cycle": ("monarch_kernel.controller.state", "from .runtime import a", "import cycle"),
    "cycle through the package": ("monarch_kernel.mesh.shape", "from . import values", "import cycle"),
}


@pytest.mark.parametrize(("module", "source", "report"), BROKEN.values(), ids=BROKEN)
def test_each_rule_is_enforced(module: str, source: str, report: str) -> None:
    fine = {
        "monarch_kernel": "def load():\n    from monarch_kernel.kernel import app\n    import IPython",
        "monarch_kernel.actor": "from monarch_kernel.actor.actor import Actor",
        "monarch_kernel.actor.actor": "from monarch_kernel.controller.runtime import Runtime",
        "monarch_kernel.agent": "",
        "monarch_kernel.rank.cell": "import IPython\ndef f():\n    import torch",
        "monarch_kernel.rank.rank": "from .cell import Cell",
        "monarch_kernel.controller": "",
        "monarch_kernel.controller.runtime": "from . import state\nfrom ..mesh.shape import Region",
        "monarch_kernel.controller.state": "from monarch_kernel.errors import Failure",
        "monarch_kernel.data": "",
        "monarch_kernel.data.roads": "import numpy",
        "monarch_kernel.errors": "",
        "monarch_kernel.kernel": "",
        "monarch_kernel.kernel.app": "from ipykernel import kernelapp\nfrom monarch_kernel.ui import text",
        "monarch_kernel.mesh": "",
        "monarch_kernel.mesh.shape": "",
        "monarch_kernel.mesh.values": "from .shape import Region",
        "monarch_kernel.transport": "",
        "monarch_kernel.transport.zmq": "import zmq",
        "monarch_kernel.ui": "",
        "monarch_kernel.ui.text": "",
        "monarch_kernel.wire": "import msgspec",
        "monarch_kernel.wire.codec": "",
    }
    packages = frozenset(name for name in fine if any(other.startswith(name + ".") for other in fine))
    assert violations(fine, packages) == []
    found = violations({**fine, module: source}, packages)
    assert found
    assert report in found[0]
