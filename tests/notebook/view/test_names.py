"""Tests descriptions of names, and hints."""

from __future__ import annotations

from monarch_kernel.notebook.view.names import described, pull_hint, push_hint


def test_a_description() -> None:
    description = {"Signature": "f(x)", "Docstring": "First.\nSecond.", "Type": "function"}
    assert described(description, color=False) == "Signature: f(x)\nType:      function\nDocstring:\nFirst.\nSecond."
    assert described(description, color=True).startswith("\x1b[31mSignature: \x1b[39mf(x)")
    assert described({}, color=False) == ""


def test_hints_say_what_to_write() -> None:
    assert push_hint("x", "list", "t") == 'x is in this notebook (list), not on the ranks: t["x"] = x pushes it'
    assert 'push it: t["f"] = f' in push_hint("f", "function", "t")
    assert "import it" in push_hint("np", "module", "t")
    assert pull_hint("x", [("t", [0, 1], True)]) == (
        'x is on [0-1] of t, not in this notebook: t["x"] pulls it, a %%remote t cell runs there'
    )
    assert 't[[1]]["x"] pulls it' in pull_hint("x", [("t", [1], False), ("u", [0], True)])
    assert "on [1] of t, on [0] of u" in pull_hint("x", [("t", [1], False), ("u", [0], True)])
