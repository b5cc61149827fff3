"""The layers of the package: imports go only downwards, without cycles, and each third-party library stays in its folders."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "monarch_kernel"
ROOT = Path(__file__).parents[1] / PACKAGE

# From low to high. Names in one line do not import each other. Each name is a component: a package, a folder in one, or a
# module, with everything in it.
LAYERS = (
    ("base",),
    ("base.mesh", "errors"),
    ("net.wire", "train.planning"),
    ("launch", "net.memory", "runtime.diagnostics"),
    ("net.transport", "notebook.view"),
    ("net.hosts", "runtime.rpc"),
    ("runtime.host",),
    ("notebook.output", "runtime.buffers"),
    ("runtime.worker",),
    ("features.resharding", "features.watch", "runtime.controller"),
    (
        "features.debugging",
        "features.editing",
        "features.live",
        "features.profiling",
        "features.replicas",
        "features.tensors",
        "features.traffic",
        "features.widgets",
        "notebook.syntax",
        "runtime.detached",
        "testing",
    ),
    ("features.record", "notebook.clients"),
    ("actor", "live", "train.stateful_loaders"),
    ("doctor", "rdma", "train.generators", "train.process_group", "train.run_on_all", "train.spmd"),
    ("tensor", "train.record"),
    ("cli", "train.checkpoint", "train.parallel"),
    ("train.snapshots",),
    ("bootstrap", "notebook.cells"),
    ("notebook.magics",),
    ("integrations.lightning", "integrations.monarch", "integrations.vllm", "notebook.kernel"),
    ("integrations.monarch_path.monarch",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS)  # the package's __init__ may import everything, lazily

# Third-party library -> the folders or modules that may import it.
BEHIND = {
    "IPython": (
        "notebook.cells",
        "notebook.kernel",
        "notebook.magics",
        "runtime.worker.cell_shell",
        "runtime.worker.ipython_shell",
    ),
    "anywidget": ("notebook.view",),
    "asyncssh": ("launch.ssh",),
    "comm": ("features.widgets.worker", "notebook.magics.rank_widgets", "notebook.view"),
    "cryptography": ("runtime.buffers.streams",),
    "ipykernel": ("notebook.kernel",),
    "ipywidgets": ("notebook.view",),
    "kubernetes": ("launch.kubernetes",),
    "lightning": ("integrations.lightning.unified",),
    "lightning_fabric": ("integrations.lightning.standalone",),
    "lightning_sdk": ("launch.lightning",),
    "mcp": ("notebook.clients.agent_server",),
    "mcp_types": ("notebook.clients.agent_server",),
    "msgspec": ("net.transport.shared_frames", "net.wire"),
    "pytorch_lightning": ("integrations.lightning.standalone",),
    "ray": ("launch.ray",),
    "safetensors": ("train.checkpoint.exporting",),
    "tensorboard": ("features.live.tensorboard",),
    "torch": (
        "features.live.logged_values",
        "features.live.skipping",
        "features.live.worker",
        "features.profiling.worker",
        "features.record.digests",
        "features.record.worker",
        "features.replicas",
        "features.resharding",
        "features.tensors.collectives",
        "features.tensors.drawing",
        "features.tensors.functions",
        "features.tensors.parts",
        "features.tensors.placing",
        "features.tensors.refilling",
        "features.tensors.rules",
        "features.tensors.samples",
        "features.tensors.sharding",
        "features.tensors.worker",
        "integrations.lightning",
        "integrations.monarch.timer",
        "integrations.vllm",
        "net.memory.devices",
        "net.wire.tensor_frames",
        "runtime.worker",
        "tensor",
        "train.checkpoint",
        "train.generators",
        "train.parallel",
        "train.process_group",
        "train.run_on_all",
        "train.snapshots.capture",
        "train.spmd",
        "train.stateful_loaders",
    ),
    "transformers": ("integrations.vllm.engine",),
    "vllm": ("integrations.vllm.engine", "integrations.vllm.transfer"),
    "xxhash": ("features.record.digests",),
    "zmq": ("net.hosts", "net.transport"),
}
# An import of torch takes a second, and these components are also imported by processes that don't need it.
ONLY_IN_FUNCTIONS = {
    ("kubernetes", "launch"),
    ("lightning_sdk", "launch"),
    ("torch", "features.live"),
    ("torch", "features.profiling"),
    ("torch", "features.record"),
    ("torch", "features.replicas"),
    ("torch", "features.resharding"),
    ("torch", "features.tensors"),
    ("torch", "integrations.lightning"),
    ("torch", "integrations.vllm"),
    ("torch", "net.memory"),
    ("torch", "net.wire"),
    ("torch", "runtime.worker"),
    ("torch", "train.process_group"),
    ("torch", "train.spmd"),
}


def component_of(module: str) -> str:
    """Name the component of a module, given without the package's name; empty if it is in none."""
    while module and module not in LEVEL:
        module = module.rpartition(".")[0]
    return module


@dataclass(frozen=True)
class Import:
    """An import of ``target``, a dotted name; ``lazy`` if it is in a function or only for type checkers."""

    target: str
    line: int
    lazy: bool


def imports_of(module: str, source: str, *, package: bool, known: frozenset[str]) -> Iterator[Import]:
    """Yield all imports in a module; a name imported from a package counts as the module of that name."""

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
                if not isinstance(child, ast.expr):  # no expression has an import, and most nodes are expressions
                    yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def violations(sources: dict[str, str], packages: frozenset[str]) -> list[str]:
    """List the imports that break a rule.

    Args:
        sources: dotted name -> source, of every module of the package.
        packages: those names that are packages.
    """
    known = frozenset(sources)
    found: list[str] = []
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        inner = module.partition(".")[2]
        part, items = component_of(inner), list(imports_of(module, source, package=module in packages, known=known))
        is_above = any(component.startswith(f"{inner}.") for component in LEVEL)  # a folder of components, without code
        if inner and not part and (items or not is_above):
            found.append(f"{module}: it is in no layer")
            continue
        level = LEVEL[part] if part else TOP
        for item in items:
            where = f"{module}:{item.line}"
            top, _, rest = item.target.partition(".")
            if top != PACKAGE:
                found.extend(f"{where}: {problem}" for problem in third_party(module, part, top, item))
                continue
            target = component_of(rest)
            if part and target != part and (LEVEL[target] if target else TOP) >= level:
                found.append(f"{where}: imports {item.target}, which is not in a lower layer")
            if not part and not item.lazy and target and LEVEL[target] > LEVEL["actor"]:
                found.append(f"{where}: imports {item.target} eagerly")
            # The package's __init__ imports lazily, so it is part of no cycle.
            if part and item.target in known and item.target != module:
                graph[module].add(item.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("import cycle: " + " -> ".join(reversed(error.args[1])))
    return found


def third_party(module: str, part: str, top: str, item: Import) -> Iterator[str]:
    """Yield the problems of an import of a third-party library."""
    if top not in BEHIND or (not part and item.lazy):
        return
    inner = module.partition(".")[2]
    if not any(inner == allowed or inner.startswith(allowed + ".") for allowed in BEHIND[top]):
        yield f"imports {top}, which stays in {' and '.join(BEHIND[top])}"
    elif (top, part) in ONLY_IN_FUNCTIONS and not item.lazy:
        yield f"imports {top} outside a function"


def read_package() -> tuple[dict[str, str], frozenset[str]]:
    """Read the sources of the package, and the names of its modules that are packages."""
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


def package_graph(sources: dict[str, str], packages: frozenset[str]) -> dict[str, set[str]]:
    """Map each package and each public module to those that it imports, in functions too."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        if name := module.partition(".")[2].partition(".")[0]:
            imports = imports_of(module, source, package=module in packages, known=frozenset(sources))
            tops = {part[1] for item in imports if len(part := item.target.split(".")) > 1 and part[0] == PACKAGE}
            graph.setdefault(name, set()).update(tops - {name})
    return graph


def test_packages_form_ten_layers_without_a_cycle() -> None:
    graph = package_graph(*read_package())
    depth: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():  # raises CycleError
        depth[name] = 1 + max((depth[other] for other in graph[name]), default=0)
    assert len(graph) <= 22
    assert max(depth.values()) <= 10, depth
    assert sum(map(len, graph.values())) <= 90, graph


def missing(modules: frozenset[str], layers: Iterable[str], behind: Iterable[str], lazy: Iterable[str]) -> list[str]:
    """List the names in the tables that do not exist in the package."""
    inner = {module.partition(".")[2] for module in modules} - {""}
    return [
        *(f"LAYERS: {name} does not exist" for name in sorted(set(layers) - inner)),
        *(f"BEHIND: {name} does not exist" for name in sorted(set(behind) - inner)),
        *(f"ONLY_IN_FUNCTIONS: {name} is no component" for name in sorted(set(lazy) - set(layers))),
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
        "BEHIND: a.c does not exist",
        "BEHIND: e does not exist",
        "ONLY_IN_FUNCTIONS: b is no component",
    ]


def test_the_package_has_few_components() -> None:
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    folders = {str(path.parent) for path in paths if len(path.parts) > 3}
    assert folders == {"net/wire/messages"}, "another folder in a folder of a package"
    assert len({path.parts[0] for path in paths if len(path.parts) > 1}) <= 12
    assert len([path for path in paths if len(path.parts) == 1]) <= 8


BROKEN = {
    "upward": ("monarch_kernel.base.mesh.shape", "import monarch_kernel.actor.actor", "not in a lower layer"),
    "upward in a function": (
        "monarch_kernel.net.wire.codec",
        "def f():\n    from monarch_kernel.runtime.controller import state",
        "not in a lower layer",
    ),
    "upward for type checkers": (
        "monarch_kernel.net.wire.codec",
        "if TYPE_CHECKING:\n    from monarch_kernel.actor.actor import Actor",
        "not in a lower layer",
    ),
    "sideways": ("monarch_kernel.net.memory.paths", "from ..transport import base", "not in a lower layer"),
    "the root": ("monarch_kernel.base.mesh.shape", "from monarch_kernel import Actor", "not in a lower layer"),
    "the root, relative": ("monarch_kernel.base.mesh.shape", "from ... import actor", "not in a lower layer"),
    "zmq": ("monarch_kernel.runtime.controller.state", "import zmq.asyncio", "imports zmq"),
    "torch eagerly": ("monarch_kernel.runtime.worker.rank", "import torch", "outside a function"),
    "torch elsewhere": ("monarch_kernel.net.memory.paths", "def f():\n    import torch", "imports torch"),
    "IPython in a rank": ("monarch_kernel.runtime.worker.rank", "from IPython.core import x", "imports IPython"),
    "ipykernel by the root": ("monarch_kernel", "import ipykernel", "imports ipykernel"),
    "kernel by the root": ("monarch_kernel", "from monarch_kernel.notebook.kernel import app", "eagerly"),
    "no layer": ("monarch_kernel.utils", "", "in no layer"),
    "no component": ("monarch_kernel.runtime.utils", "", "in no layer"),
    "above components": ("monarch_kernel.runtime", "import monarch_kernel.errors", "in no layer"),
    "cycle": ("monarch_kernel.runtime.controller.state", "from .runtime import a", "import cycle"),
    "cycle through the package": ("monarch_kernel.base.mesh.shape", "from . import values", "import cycle"),
}


@pytest.mark.parametrize(("module", "source", "report"), BROKEN.values(), ids=BROKEN)
def test_each_rule_is_enforced(module: str, source: str, report: str) -> None:
    fine = {
        "monarch_kernel": "def load():\n    from monarch_kernel.notebook.kernel import app\n    import IPython",
        "monarch_kernel.actor": "from monarch_kernel.actor.actor import Actor",
        "monarch_kernel.actor.actor": "from monarch_kernel.runtime.controller.runtime import Runtime",
        "monarch_kernel.runtime": "",
        "monarch_kernel.runtime.host": "",
        "monarch_kernel.runtime.worker.cell_shell": "import IPython\ndef f():\n    import torch",
        "monarch_kernel.runtime.worker.rank": "from .cell_shell import Cell",
        "monarch_kernel.runtime.controller": "",
        "monarch_kernel.runtime.controller.runtime": "from . import state\nfrom ...base.mesh.shape import Region",
        "monarch_kernel.runtime.controller.state": "from monarch_kernel.errors import Failure",
        "monarch_kernel.net.memory": "",
        "monarch_kernel.net.memory.paths": "import numpy",
        "monarch_kernel.errors": "",
        "monarch_kernel.notebook.kernel": "",
        "monarch_kernel.notebook.kernel.app": "from ipykernel import kernelapp\nfrom monarch_kernel.notebook.view import text",
        "monarch_kernel.base.mesh": "",
        "monarch_kernel.base.mesh.shape": "",
        "monarch_kernel.base.mesh.values": "from .shape import Region",
        "monarch_kernel.net.transport": "",
        "monarch_kernel.net.transport.base": "import zmq",
        "monarch_kernel.notebook.view": "",
        "monarch_kernel.notebook.view.text": "",
        "monarch_kernel.net.wire": "import msgspec",
        "monarch_kernel.net.wire.codec": "",
    }
    packages = frozenset(name for name in fine if any(other.startswith(name + ".") for other in fine))
    assert violations(fine, packages) == []
    found = violations({**fine, module: source}, packages)
    assert found
    assert report in found[0]


def test_no_class_is_long() -> None:
    long: list[str] = []
    for module, source in read_package()[0].items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 450 or count > 40:
                    long.append(f"{module}.{node.name}: {lines} lines, {count} methods")
    assert not long, "\n".join(long)


def test_no_module_is_long() -> None:
    long = {module: lines for module, text in read_package()[0].items() if (lines := text.count("\n")) > 800}
    assert not long


def test_no_private_name_is_imported() -> None:
    """What another module needs has a public name."""
    found = [
        f"{module}:{node.lineno}: {alias.name}"
        for module, source in read_package()[0].items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not found, "\n".join(found)
