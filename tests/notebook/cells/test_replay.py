"""Tests which earlier cells defined the names that a cell needs."""

from __future__ import annotations

import pytest

from monarch_kernel.notebook.cells.replay import cells_for, reads

IMPORTS = "import torch\nfrom torch import nn"
NET = "class Net(nn.Module):\n    def forward(self, x): return act(x)"
ACT = "def act(x): return torch.relu(x)"
BUILD = "model = Net(); opt = torch.optim.SGD(model.parameters(), lr=lr)"
LOOP = "for step in live.loop(3):\n    loss = model(batch(step))\n    losses.append(loss)"


@pytest.mark.parametrize(
    ("code", "history", "found"),
    [
        ("x + 1", ["x = 1", "y = 2"], [0]),
        ("x + 1", ["x = 1", "y = x", "x = 2"], [2]),
        ("x + 1", ["x = 1", "x += 1"], [0, 1]),
        ("y", ["x = 1", "y = x", "x = 2"], [0, 1]),
        ("x = 1\nx", ["x = 0"], []),
        ("x = x + 1", ["x = 0"], [0]),
        (
            LOOP,
            [IMPORTS, NET, ACT, "lr = 1", BUILD, "losses = []", "print(model)", "def batch(i): return i"],
            [0, 1, 2, 3, 4, 5, 7],
        ),
        (
            LOOP,
            [IMPORTS, NET, "lr = 1", BUILD, ACT],
            [0, 1, 2, 3, 4],
        ),  # a name that a function reads must exist only at the call
        (LOOP, ["step = 1", "loss = 2"], []),
        ("model", ["def build():\n    global model\n    model = 1", "x = 2", "build()"], [0, 2]),
        ("model", ["def build():\n    global model\n    model = 1\nbuild()"], [0]),
        ("model", ["def build():\n    global model\n    model = 1"], []),
        ("[a for a in b]", ["a = 1", "b = 2"], [1]),
        ("(lambda a: a + b)(1)", ["a = 1", "b = 2"], [1]),
        ("def f(a=b): return a", ["b = 1", "a = 2"], [0]),
        ("def f():\n    c = 1\n    def g(): return c + d\n    return g", ["c = 2", "d = 3"], [1]),
        ("with open(p) as f: f.read()", ["f = 1", "p = 2"], [1]),
        ("import a.b\na.b.c", ["a = 1"], []),
        ("a.b", ["import a.b", "from c import a"], [1]),
        ("try: x\nexcept E as error: error", ["x = 1", "error = 2", "E = 3"], [0, 2]),
        ("print(len(x))", ["def len(x): return 1", "x = 1"], [0, 1]),
        ("x", ["x = = 1", "x = 1"], [1]),
        ("x = = 1", ["x = 1"], []),
        ("x", ["for x in range(3): pass"], [0]),
        ("x", ["if c:\n    x = 1", "c = 1"], [0]),
        ("f(x)", ["f, (x, *y) = g()", "g = 1"], [0]),
        ("for i in range(3):\n    loss = i\n    print(loss)", ["loss = 1", "i = 2"], []),
        ("class A(B):\n    x = 1\n    y = x + z", ["x = 2", "z = 3", "B = 4"], [1, 2]),
        ("match a:\n    case {'k': v, **rest}: (v, rest, w)", ["v = 1", "rest = 2", "w = 3", "a = 4"], [2, 3]),
        ("{k: v for k, v in d.items() if k in e}", ["k = 1", "d = 2", "e = 3"], [1, 2]),
        ("(y := x) + y", ["y = 1", "x = 2"], [1]),
        ("x: int", ["x = 1", "int = 2"], []),
        ("await f(x)", ["async def f(x): return z", "x = 1", "z = 1"], [0, 1, 2]),
    ],
)
def test_needed_cells(code: str, history: list[str], found: list[int]) -> None:
    assert cells_for(code, history) == found


def test_read_names() -> None:
    assert reads(f"{LOOP}\ndef f(): return later") == ["batch", "live", "losses", "model"]


def test_a_transform_turns_cells_into_python() -> None:
    assert cells_for("!x", ["x = 1", "!y"], lambda code: code.replace("!", "")) == [0]
