"""Type checkers understand the handles: they check the arguments of endpoints, and know the types of results."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).parents[2]

ACTORS = """
from typing import Any

from monarch_kernel.actor import *


class Trainer(Actor):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    @endpoint
    def step(self, n: int, *, scale: float = 1.0) -> float:
        return self.lr * n * scale

    @endpoint()
    def save(self, path: str) -> None: ...

    @endpoint
    def reset(self) -> None:
        self.lr = 0.0

    def peek(self, n: int) -> float:
        return self.lr * n


class Server(Actor):
    @endpoint
    async def load(self, name: str) -> bytes:
        return name.encode()

    @concurrent_endpoint
    async def generate(self, prompt: str, tokens: int = 1) -> list[str]:
        return [prompt] * tokens

    @concurrent_endpoint()
    async def count(self) -> int:
        return 1

    @endpoint(explicit_response_port=True)
    async def later(self, port: Port[int], prompt: str) -> None: ...


procs = this_host().spawn_procs({"gpus": 2})
trainer = procs.spawn("trainer", Trainer, 0.1)
server = procs.spawn("server", Server)
"""

KNOWN = {
    "trainer": "Trainer",
    "trainer.step.call(3)": "Future[ValueMesh[float]]",
    "trainer.step.call(3, scale=2.0).get()": "ValueMesh[float]",
    "trainer.step.call(3).get().item(gpus=0)": "float",
    "trainer.step.call_one(n=3).get()": "float",
    "trainer.step.choose(3).get()": "float",
    "[future.get() for future in trainer.step.stream(3)]": "list[float]",
    "trainer.save.call_one('x').get()": "None",
    "trainer.slice(gpus=0)": "Trainer",
    "trainer.slice(gpus=0).step.call_one(1).get()": "float",
    "trainer.flatten('rank').rename(rank='r').split(r=('a', 'b'), a=1)": "Trainer",
    "trainer.extent": "Extent",
    "len(trainer) + trainer.size('gpus')": "int",
    "trainer.initialized.get()": "bool",
    "trainer.stop('done')": "Future[None]",
    "server.load.call_one('x').get()": "bytes",
    "server.generate.call_one('x', tokens=2).get()": "list[str]",
    "server.count.call_one().get()": "int",
    "as_endpoint(trainer.peek).call(3)": "Future[ValueMesh[float]]",
    "send(trainer.step, (3,), {})": "None",
    "Accumulator(trainer.step, 0.0, lambda a, b: a + b).accumulate(3)": "Future[float]",
    "get_or_spawn_controller('t', Trainer, 0.1).get()": "Trainer",
    "server.later.call_one('x')": "Future[int]",
    "Channel.open()": "tuple[Port[Any], PortReceiver[Any]]",
    "Channel[int].open()": "tuple[Port[int], PortReceiver[int]]",
    "Channel[int].open()[1].recv().get()": "int",
}

REFUSED = {
    "trainer.step.call('3')": "arg-type",
    "trainer.step.call()": "call-arg",
    "trainer.step.call(3, 4)": "call-arg",
    "trainer.step.call(3, speed=2.0)": "call-arg",
    "trainer.step.call_one('3')": "arg-type",
    "trainer.step.choose('3')": "arg-type",
    "trainer.step.stream('3')": "arg-type",
    "trainer.step.broadcast('3')": "arg-type",
    "trainer.slice(gpus=0).step.call('3')": "arg-type",
    "trainer.slice(gpus='0')": "arg-type",
    "trainer.save.call(3)": "arg-type",
    "trainer.nope.call()": "attr-defined",
    "trainer.step(3)": "operator",
    "server.load.call(3)": "arg-type",
    "server.generate.call('x', tokens='y')": "arg-type",
    "server.later.call()": "call-arg",
    "as_endpoint(trainer.peek).call('3')": "arg-type",
    "as_endpoint(3)": "call-overload",
    "Channel[int].open()[0].send('3')": "arg-type",
    "Accumulator(trainer.step, 0.0, lambda a, b: a + b).accumulate('3')": "arg-type",
    "procs.spawn('t', Trainer)": "call-arg",
    "procs.spawn('t', Trainer, 'x')": "arg-type",
    "get_or_spawn_controller('t', Trainer, 'x')": "arg-type",
    "concurrent_endpoint(lambda self: 1)": "arg-type|call-overload|return-value|misc",
    "procs.spawn('x', int)": "type-var",
}


def check(source: str, folder: Path) -> list[tuple[int, str]]:
    """Run mypy on a program, and return its messages by line."""
    file = folder / "sample.py"
    file.write_text(source, encoding="utf-8")
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    options += ["--hide-error-context", "--no-error-summary", "--show-error-codes"]
    said, errors, _ = api.run([*options, str(file)])
    assert not errors
    found = re.findall(r"^.*sample\.py:(\d+): (.*)$", said, re.MULTILINE)
    return [(int(line), text) for line, text in found]


@pytest.mark.slow  # without a cache, mypy reads everything that the package imports
def test_correct_code_passes_with_its_types_and_wrong_code_is_refused(tmp_path: Path) -> None:
    actors = textwrap.dedent(ACTORS)
    first = actors.count("\n") + 1
    lines = [f"reveal_type({expression})" for expression in KNOWN] + list(REFUSED)
    said: dict[int, str] = {}
    for line, text in check(actors + "\n".join(lines) + "\n", tmp_path):
        said[line] = f"{said.get(line, '')}{text}\n"
    assert not [(line, text) for line, text in said.items() if line < first], "the classes themselves are right"
    for line, (expression, known) in enumerate(KNOWN.items(), first):
        revealed = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", said.get(line, ""))
        assert revealed == f'note: Revealed type is "{known}"\n', expression
    for line, (expression, code) in enumerate(REFUSED.items(), first + len(KNOWN)):
        assert re.search(rf"error: .*\[({code})\]", said.get(line, "")), (expression, said.get(line))
