"""Find the references in docstrings, comments and Markdown, and resolve them.

References in texts become wrong when code moves. `check` reads the sources without importing the project, and reports the file
and the line of each reference to something that does not exist.

What counts as a reference
==========================

In docstrings and comments, a pair of *single* backticks marks a reference, which must exist:

- A path (`base/mesh/shape.py`, `docs/`, `errors.py`): the path of some file or folder of the project ends with it. A word in
  capitals matches any text (`tests/launch/bench_ENGINE.py`).
- A dotted name (`ProcMesh.heal`, `base.mesh.shape.Region`): its first part is a module, a class or a function of the project,
  or an import of the file. The test looks for a module in the folder of the file, in the folders above it, and in the package;
  for a class everywhere. Members are methods, fields, class attributes, attributes that methods set on ``self``, and the
  members of base classes.
- A class (`RanksError`): the project or Python defines it, or the code of the same file mentions it.
- Any other name (`heal`, `OUTSIDE`): the code of the same file mentions it, or the project defines it; a private name must be
  defined in the same folder.

A pair of *double* backticks marks code, which may be anything. The test checks only what must belong to the project: a path
below one of the project's folders, and a dotted name that starts with a class or a module of the project.

Markdown has single backticks for both. There the test checks paths, dotted names that start with a class, a module or one of
`VARIABLES` (``mesh.run()``), members alone (``.get()``), classes, and functions with parentheses. `ARCHITECTURE.md` and
`CONTRIBUTING.md` describe the code, so the test also checks other single names there. `OUTSIDE` lists the names in Markdown
that belong to other projects.

The package and the guides for users must not refer to names that only tests or benchmarks define; their references to tests
start with the folder (`tests/conftest.py`).

What is not checked
===================

- Names of other libraries. A dotted name that starts with a library that the project imports is accepted. Names of the
  standard library in single backticks are resolved by an import.
- Members of a class that has a ``__getattr__``, or a base class of another library.
- Parts after the first member: of `ValueMesh.extent.sizes` only `ValueMesh.extent` is checked.
- Fenced blocks, keyword arguments, longer code than one name or call, and strings that are not docstrings.
- `CHANGELOG.md`. It describes the past, so its names may be gone.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal

ROOT = Path(__file__).parents[2]
PACKAGE = "monarch_kernel"
FOLDERS = (PACKAGE, "tests", "benchmarks", "notebooks")
PAST = {"CHANGELOG.md"}
ABOUT_CODE = {"ARCHITECTURE.md", "CONTRIBUTING.md"}
NOT_OURS = {"node_modules", "build", "dist", "lib", "__pycache__"}  # folders that tools create

# Variables of the examples in Markdown -> the classes of their values.
VARIABLES = {
    "buf": ("Buffer",),
    "failure": ("MeshFailure",),
    "future": ("Future",),
    "hosts": ("HostMesh",),
    "m": ("ProcMesh",),
    "mesh": ("ProcMesh", "ActorMesh", "HostMesh"),
    "run": ("BackgroundCell", "Record"),
    "t": ("ProcMesh",),
    "trainers": ("ProcMesh",),
}
# Origin -> names in Markdown that this project does not define.
OUTSIDE: dict[str, set[str]] = {
    "files that commands make": {".venv", "knobs/", "speed/"},
    "examples": {"Counter", "Net"},
    "Hugging Face": {"Accelerator", "TrainingArguments", "notebook_launcher"},
    "JAX": {"shard_map"},
    "Jupyter, IPython": {"Out"},
    "Lightning": {
        "DDPStrategy",
        "FSDPStrategy",
        "ModelCheckpoint",
        "ModelParallelStrategy",
        "OnExceptionCheckpoint",
        "Trainer",
        "Tuner",
        "configure_model",
    },
    "Linux": {"MemAvailable"},
    "Python": {"Any", "CancelledError"},
    "Ray Train": {
        "FailureConfig",
        "ScalingConfig",
        "TorchTrainer",
        "get_checkpoint",
        "get_context",
        "prepare_data_loader",
        "prepare_model",
    },
    "ssh": {
        "AllowTcpForwarding",
        "ForceCommand",
        "IdentityFile",
        "Include",
        "Match",
        "ProxyJump",
        "StrictHostKeyChecking",
    },
    "torchdata": {"StatefulDataLoader"},
    "datasets": {"split_dataset_by_node"},
    "webdataset": {"WebDataset"},
    "torchao": {"quantize_"},
    "torch": {
        "DataLoader",
        "DeviceMesh",
        "Linear",
        "Replicate",
        "Shard",
        "distribute_tensor",
        "init_device_mesh",
        "reset_parameters",
    },
}

SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)([^`]+)(?<!`)\1(?!`)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"(\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?", re.DOTALL)
PATH = re.compile(r"[\w*][\w.*-]*(?:/[\w.*-]+)*/?")
SUFFIXES = (".py", ".pyi", ".ts", ".js", ".css", ".sh", ".ipynb", ".md", ".toml")
DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:class|def)[ \t]+(\w+)|^(?: {4})?(\w+)[ \t]*[:=]", re.MULTILINE)
SET_ON_SELF = re.compile(r"\bself\.(\w+)[ \t]*[:=]")
IMPORTED = re.compile(
    r"^[ \t]*(?:import[ \t]+(\w+)(?=[.,]|$|[ \t]as\b)|from[ \t]+(\w+)[\w.]*[ \t]+import\b)", re.MULTILINE
)
COMMENT = re.compile(r"#.*`")
WORD = re.compile(r"[A-Za-z_]\w*")
MARKED = re.compile(r"(?<!`)`(?!`)|``\w+[./]\w")  # files without any of these have nothing to check

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SIMPLE = (
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Return,
    ast.Raise,
    ast.Import,
    ast.ImportFrom,
    ast.Pass,
)

Kind = Literal["docstring", "comment", "Markdown"]
Found = Literal["path", "module", "class", "member", "name", "Python", "other library", "no reference"]


@dataclass(frozen=True)
class Reference:
    """The text in a pair of backticks; ``is_marked`` if it can only be a reference."""

    path: str
    line: int
    text: str
    kind: Kind
    is_marked: bool


class Source:
    """A Python file, parsed when needed."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        parts = PurePosixPath(path).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.module = ".".join(parts[:-1] if self.is_package else parts)
        self.package = self.module if self.is_package else self.module.rpartition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def top(self) -> dict[str, ast.stmt]:
        """Name -> the statement that defines it, at the top level of the module."""
        return {name: node for node in statements(self.tree, into=False) for name in bound_by(node)}

    @cached_property
    def statements(self) -> list[ast.stmt]:
        return list(statements(self.tree))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.statements if isinstance(node, ast.ClassDef)}

    @cached_property
    def docstrings(self) -> list[tuple[ast.stmt, str]]:
        """Strings that are statements: docstrings of functions and classes, and those below assignments."""
        return [
            (node, node.value.value)
            for node in self.statements
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]

    @cached_property
    def mentioned(self) -> frozenset[str]:
        """All words of the code, without docstrings and comments."""
        lines = self.text.split("\n")
        for node, _ in self.docstrings:
            for n in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[n] = ""
        return frozenset(WORD.findall("\n".join(line.partition("#")[0] for line in lines)))

    @cached_property
    def imports(self) -> dict[str, ast.stmt]:
        """Name -> the import that binds it, also inside functions."""
        return {name: n for n in self.statements if isinstance(n, ast.Import | ast.ImportFrom) for name in bound_by(n)}

    def origin(self, name: str) -> str | None:
        """The dotted name of the object that an import of this module binds to ``name``."""
        node = self.top.get(name) or self.imports.get(name)
        if isinstance(node, ast.Import):
            return next((a.name if a.asname else name for a in node.names if (a.asname or name) == name), None)
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = self.package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
            return next((f"{base}.{a.name}" for a in node.names if (a.asname or a.name) == name), None)
        return None

    def references(self) -> Iterator[Reference]:
        """Find the text in backticks in docstrings and comments."""
        if not MARKED.search(self.text):
            return
        for node, text in self.docstrings:
            yield from spans(self.path, node.lineno, text, "docstring")
        if COMMENT.search(self.text):
            yield from self._in_comments()

    def _in_comments(self) -> Iterator[Reference]:
        block: list[str] = []
        first = last = 0
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                if token.start[0] != last + 1:
                    yield from spans(self.path, first, "\n".join(block), "comment")
                    block, first = [], token.start[0]
                block.append(token.string)
                last = token.start[0]
        yield from spans(self.path, first, "\n".join(block), "comment")


def spans(path: str, line: int, text: str, kind: Kind) -> Iterator[Reference]:
    """Find the text in backticks in a text that starts at ``line``."""
    for match in SPAN.finditer(text) if "`" in text else ():
        is_marked = kind != "Markdown" and match[1] == "`"
        yield Reference(path, line + text.count("\n", 0, match.start()), match[2], kind, is_marked)


def in_markdown(path: str, text: str) -> Iterator[Reference]:
    """Find the text in backticks in Markdown, outside fenced blocks."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):  # a single backtick without a partner ends with its paragraph
        yield from spans(path, line, paragraph, "Markdown")
        line += paragraph.count("\n")


def statements(node: ast.AST, *, into: bool = True) -> Iterator[ast.stmt]:
    """Yield the statements below a node; those inside functions and classes only with ``into``."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            if isinstance(child, ast.stmt):
                yield child
            if not isinstance(child, SIMPLE) and (into or not isinstance(child, SCOPES)):
                yield from statements(child, into=into)


def bound_by(node: ast.stmt) -> Iterator[str]:
    """Yield the names that one statement binds."""
    if isinstance(node, SCOPES):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With):
        yield from (
            child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
        )


def is_set_on_self(node: ast.Attribute, name: str) -> bool:
    """Whether a method sets the attribute ``name`` here."""
    is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return is_self and node.attr == name and isinstance(node.ctx, ast.Store)


class Project:
    """The definitions of the project, and whether a reference leads to one of them.

    Args:
        texts: path -> text, of all Python and Markdown.
        paths: all other files that references may name.
    """

    def __init__(self, texts: Mapping[str, str], paths: frozenset[str] = frozenset()) -> None:
        self.texts = texts
        sources = [Source(path, text) for path, text in texts.items() if path.endswith(".py")]
        self.sources = {source.path: source for source in sources}
        self.modules = {source.module: source for source in sources}
        self.packages = {name.rpartition(".")[0] for name in self.modules if "." in name} | {
            name.partition(".")[0] for name in self.modules
        }
        self.defined: dict[str, set[str]] = defaultdict(
            set
        )  # name -> paths; found by a pattern, so it may contain too much
        self.libraries = set(sys.stdlib_module_names)
        for source in sources:
            for match in DEFINED.finditer(source.text):
                self.defined[match[1] or match[2]].add(source.path)
            for name in SET_ON_SELF.findall(source.text):
                self.defined[name].add(source.path)
            self.libraries.update(match[1] or match[2] for match in IMPORTED.finditer(source.text))
        files = frozenset(texts) | paths
        folders = {str(folder) + "/" for path in files for folder in PurePosixPath(path).parents if folder.name}
        self.tails: dict[str, set[str]] = defaultdict(set)  # last part -> paths that end in it
        for path in files | folders:
            self.tails[path.rstrip("/").rpartition("/")[2]].add("/" + path.rstrip("/"))
        self.folders = {name.split("/")[0] for name in folders}
        self.folders |= {
            name.split("/")[1] for name in folders if name.startswith(PACKAGE + "/") and name.count("/") > 1
        }

    def references(self) -> Iterator[Reference]:
        for path, text in self.texts.items():
            if "`" not in text or PurePosixPath(path).name in PAST:
                continue
            if path in self.sources:
                yield from self.sources[path].references()
            else:
                yield from in_markdown(path, text)

    def resolve(self, ref: Reference) -> Found | None:
        """Tell what kind of thing a reference leads to; None if it is broken."""
        if self._is_path(ref):
            return "path" if self._path_exists(ref.text.rstrip("/"), ref) else None
        match = NAME.fullmatch(ref.text)
        if not match or match[1].endswith(SUFFIXES) or match[1].startswith(("self.", "cls.")):
            return "no reference"
        name = match[1]
        if name.startswith("."):
            return self._lone_member(name[1:], ref)
        return self._dotted(name.split("."), ref) if "." in name else self._single(name, ref)

    def _is_path(self, ref: Reference) -> bool:
        first, slash, _ = ref.text.partition("/")
        if not PATH.fullmatch(ref.text) or first in NOT_OURS:
            return False
        if slash and first in self.folders:
            return True
        is_marked = ref.is_marked or ref.kind == "Markdown"
        return is_marked and (ref.text.endswith("/") or ref.text.endswith(SUFFIXES))

    def _path_exists(self, text: str, ref: Reference) -> bool:
        last = text.rpartition("/")[2]
        if any(path.endswith("/" + text) for path in self._ending_in(last, ref)):
            return True
        last, pattern = (re.sub(r"[A-Z]{3,}", "*", each) for each in (last, "*/" + text))
        if "*" not in pattern[1:]:
            return False
        tails = [tail for tail in self.tails if fnmatch(tail, last)]
        return any(fnmatch(path, pattern) for tail in tails for path in self._ending_in(tail, ref))

    def _ending_in(self, last: str, ref: Reference) -> list[str]:
        """The files and folders called ``last``; folders of tests have the same names as those of the package."""
        about_tests = ref.path.startswith("tests/") or ref.text.startswith("tests/")
        return [path for path in self.tails.get(last, ()) if about_tests or not path.startswith("/tests/")]

    def _lone_member(self, name: str, ref: Reference) -> Found | None:
        """``.get()``, in Markdown: the package defines this name somewhere."""
        if ref.kind != "Markdown" or not name.isidentifier():
            return "no reference"
        return "member" if self._is_defined(name, ref) else None

    def _is_defined(self, name: str, ref: Reference) -> bool:
        """Whether the project defines a name anywhere; a private one must be defined in the same folder."""
        places = self.defined.get(name, set())
        if name.startswith("__"):  # a hook that users may define, which the package looks up by name
            return bool(places) or any(f'"{name}"' in source.text for source in self.sources.values())
        if name.startswith("_") and ref.is_marked:
            return any(path.rpartition("/")[0] == ref.path.rpartition("/")[0] for path in places)
        return any(in_sight(path, ref) for path in places)

    def _single(self, name: str, ref: Reference) -> Found | None:
        is_class = name[0].isupper() and not name.isupper()
        source = self.sources.get(ref.path)
        is_called = "(" in ref.text
        if not ref.is_marked and not (ref.kind == "Markdown" and (is_class or is_called or ref.path in ABOUT_CODE)):
            return "no reference"
        if not ref.is_marked and not is_class and not name.islower():
            return "no reference"
        if hasattr(builtins, name) or name in self.libraries:
            return "Python" if name not in self.libraries or name in sys.stdlib_module_names else "other library"
        if is_class and any(self._top(name, ref)):
            return "class"
        if source and name in source.mentioned:
            return "name"
        if is_class:
            return None
        if any(self._ending_in(name + suffix, ref) for suffix in ("", ".py", ".ts")):
            return "module"
        return "name" if self._is_defined(name, ref) else None

    def _top(self, name: str, ref: Reference) -> Iterator[Source]:
        """The modules that define a name: at their top level, or as a class anywhere."""
        for path in sorted(self.defined.get(name, ())):
            source = self.sources[path]
            if not in_sight(path, ref):
                continue
            if name in source.classes or (name in source.top and source.origin(name) is None):
                yield source

    def _dotted(self, parts: list[str], ref: Reference) -> Found | None:
        source = self.sources.get(ref.path)
        first, *rest = parts
        could_be = False
        origin = source.origin(first) if source else None
        if origin and origin.partition(".")[0] not in FOLDERS:
            return self._outside([*origin.split("."), *rest], ref)
        package = source.package if source else PACKAGE
        above = package.split(".") if package else []
        roots = [".".join(above[:n]) for n in range(len(above), 0, -1)]
        for root in [*(roots if ref.is_marked else ()), PACKAGE, ""]:
            module = f"{root}.{first}".lstrip(".")
            if self._is_module(module):
                could_be = True
                if found := self._in_module(module, rest):
                    return found
        if first in FOLDERS:
            return None
        if not first.islower() or ref.is_marked:
            for owner in self._top(first, ref):
                could_be = True
                if self._in_top(owner, first, rest):
                    return "member"
        if first in VARIABLES:
            could_be = True
            if any(self._in_top(owner, name, rest) for name in VARIABLES[first] for owner in self._top(name, ref)):
                return "member"
        if origin:
            head, *more = origin.split(".")
            return "member" if self._in_module(head, [*more, *rest]) else None
        if first in self.libraries:
            return self._outside(parts, ref)
        if hasattr(builtins, first):
            return "Python" if hasattr(getattr(builtins, first), rest[0]) else None
        is_reference = could_be or ref.is_marked or (ref.kind == "Markdown" and first[0].isupper())
        return None if is_reference else "no reference"

    def _outside(self, parts: list[str], ref: Reference) -> Found | None:
        if parts[0] not in sys.stdlib_module_names or not ref.is_marked:
            return "other library"
        return "Python" if in_stdlib(parts) else None

    def _is_module(self, name: str) -> bool:
        return name in self.modules or name in self.packages

    def _in_module(self, module: str, rest: list[str]) -> Found | None:
        """Follow a dotted name from a module, through modules, to a definition in one of them."""
        while rest and self._is_module(f"{module}.{rest[0]}"):
            module, rest = f"{module}.{rest[0]}", rest[1:]
        if not rest:
            return "module"
        source = self.modules.get(module)
        return "member" if source and self._in_top(source, rest[0], rest[1:]) else None

    def _in_top(self, source: Source, name: str, rest: list[str]) -> bool:
        """Whether a module has a name, and that name has the next member."""
        if (origin := source.origin(name)) is not None:
            head, *more = origin.split(".")
            return head not in FOLDERS or bool(self._in_module(head, [*more, *rest]))
        if name in source.classes:
            return not rest or self._has_member(source, source.classes[name], rest[0], set())
        if isinstance(source.top.get(name), ast.FunctionDef | ast.AsyncFunctionDef) and rest:
            return False
        return name in source.top or (not rest and name in source.mentioned and "__getattr__" in source.top)

    def _has_member(self, source: Source, node: ast.ClassDef, name: str, seen: set[str]) -> bool:
        """Whether a class or one of its bases has a member; also true if a base is unknown."""
        if node.name in seen:
            return False
        own = {each for child in statements(node, into=False) for each in bound_by(child)}
        if name in own or "__getattr__" in own or hasattr(object, name):
            return True
        if any(isinstance(child, ast.Attribute) and is_set_on_self(child, name) for child in ast.walk(node)):
            return True
        return any(self._base_has(source, base, name, seen | {node.name}) for base in node.bases)

    def _base_has(self, source: Source, base: ast.expr, name: str, seen: set[str]) -> bool:
        while isinstance(base, ast.Subscript):
            base = base.value
        dotted = ast.unparse(base).split(".")
        if dotted[-1] in ("Struct", "Protocol", "Generic", "NamedTuple"):
            return False
        sources = [self.sources[path] for path in self.defined.get(dotted[-1], ())]
        if owners := [owner for owner in sources if dotted[-1] in owner.classes]:
            return any(self._has_member(owner, owner.classes[dotted[-1]], name, seen) for owner in owners)
        origin = [*(source.origin(dotted[0]) or dotted[0]).split("."), *dotted[1:]]
        if origin[0] in sys.stdlib_module_names:
            return in_stdlib([*origin, name])
        builtin = getattr(builtins, origin[0], None)
        return builtin is None or hasattr(builtin, name)


def in_sight(path: str, ref: Reference) -> bool:
    """Whether a text may mention a definition in ``path``; the package and its documents may not mention tests."""
    if path.startswith(PACKAGE + "/"):
        return True
    return ref.path in ABOUT_CODE or (ref.kind != "Markdown" and not ref.path.startswith(PACKAGE + "/"))


def in_stdlib(parts: list[str]) -> bool:
    """Whether a dotted name of the standard library exists."""
    try:
        value: object = importlib.import_module(parts[0])
    except ImportError:
        return False
    for n, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:n]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


@dataclass
class Report:
    """The result for all references: the broken ones, the uses of each name in `OUTSIDE`, and the count of each kind."""

    broken: list[str] = field(default_factory=list)
    outside: Counter[str] = field(default_factory=Counter)
    resolved: Counter[tuple[Kind, Found]] = field(default_factory=Counter)


def check(texts: Mapping[str, str], paths: frozenset[str] = frozenset()) -> Report:
    """Resolve every reference in the texts of a project."""
    project, report = Project(texts, paths), Report()
    for ref in project.references():
        found = project.resolve(ref)
        name = ref.text.partition("(")[0]
        if found is None and ref.kind == "Markdown" and any(name in names for names in OUTSIDE.values()):
            report.outside[name] += 1
        elif found is None:
            report.broken.append(f"{ref.path}:{ref.line}: `{ref.text}` does not exist ({ref.kind})")
        elif found != "no reference":
            report.resolved[ref.kind, found] += 1
    return report


def read_project() -> tuple[dict[str, str], frozenset[str]]:
    """Read all Python and Markdown, and list the other files."""
    texts, paths = {}, set()
    pending = [ROOT]
    while pending:
        for path in pending.pop().iterdir():
            name = path.relative_to(ROOT).as_posix()
            if path.name.startswith(".") or path.name in NOT_OURS or name == "shared":
                continue
            if path.is_dir():
                pending.append(path)
            elif path.suffix == ".md" or (path.suffix == ".py" and name.split("/")[0] in FOLDERS):
                texts[name] = path.read_text(encoding="utf-8")
            else:
                paths.add(name)
    return texts, frozenset(paths)
