"""Which modules unpickle anything; a new one needs a reason here, and a sentence in docs/security.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import monarch_kernel

MODULES = {
    "actor/hosting/actor_host.py": "a class that the program has edited",
    "errors.py": "the exception in an answer of a rank",
    "features/editing/classes.py": "classes that the program sends",
    "integrations/lightning/sync_back.py": "the state of a Trainer, which ranks return",
    "net/wire/codec.py": "payloads of authenticated processes",
    "runtime/diagnostics/failures.py": "an exception that this process has just pickled",
    "runtime/worker/spawned.py": "names of the process that starts this one",
    "train/checkpoint/unpickling.py": "files of checkpoints, with a list of classes",
    "train/process_group/flight_recorder.py": "what torch's recorder in this process has just pickled",
    "train/snapshots/capture.py": "a snapshot that a rank has taken, in memory",
}
GATHER = {
    "features/replicas/in_loop.py": "checksums of parameters",
    "train/parallel/cross_rank.py": "checksums of parameters",
    "train/parallel/steps.py": "what steps do with a model, and checksums",
    "train/run_on_all.py": "errors and small results of code on all ranks, such as a save of a checkpoint",
}
"""Modules that gather pickled objects by a collective, which authenticates nobody between machines."""

AGENTS = ("runtime/host/", "net/hosts/", "net/transport/", "net/memory/", "launch/")
NAMES = {"pickle", "cloudpickle", "marshal", "dill", "joblib", "shelve", "torch", "np", "numpy"}


def unpickles(source: str) -> bool:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in NAMES:
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in NAMES:
            found |= {each.name for each in node.names}
    return bool(found & {"load", "loads", "Unpickler", "_Unpickler"})


def test_only_these_modules_unpickle() -> None:
    root = Path(monarch_kernel.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if unpickles(path.read_text())}
    assert found == MODULES.keys()
    assert not [path for path in found if path.startswith(AGENTS)]


CALLS = re.compile(r"\b(?:(?:all_)?gather_object|(?:broadcast|scatter|send|recv)_object_list)(?=\()")


def test_only_these_modules_gather_objects_by_collectives() -> None:
    root = Path(monarch_kernel.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if CALLS.search(path.read_text())}
    assert found == GATHER.keys()


def test_the_search_finds_what_unpickles() -> None:
    for text in ("pickle.loads(x)", "torch.load(f)", "from pickle import loads", "class A(pickle.Unpickler): ..."):
        assert unpickles(f"import pickle, torch\n{text}")
    assert not unpickles("import json, pickle\njson.loads(x), pickle.dumps(x)")
