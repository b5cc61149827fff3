"""Where in a cell is code for ranks."""

from __future__ import annotations

import pytest

from monarch_kernel.notebook.names import RemoteCode, remote_code


def at(text: str) -> RemoteCode | None:
    """What is at the cursor, which is written as ``|``."""
    cursor = text.index("|")
    return remote_code(text.replace("|", ""), cursor, lambda name: name == "t")


@pytest.mark.parametrize(
    ("text", "found"),
    {
        "%%remote\nx|": ("", "x", "x"),
        "%%remote t[0, 1] --raw\na\nb|c\nd": ("t[0, 1]", "a\nbc\nd", "b"),
        "\n\n%%remote t\n|": ("t", "", ""),
        "%remote x|": ("", "x", "x"),
        "%remote t x.y|z": ("t", "x.yz", "x.y"),
        "%remote t[0] x|": ("t[0]", "x", "x"),
        "a = 1\n%remote t x|\nb": ("t", "x", "x"),
    }.items(),
)
def test_code_for_ranks(text: str, found: tuple[str, str, str]) -> None:
    code = at(text)
    assert code is not None
    assert (code.selector, code.code, code.before) == found


def test_every_cell_is_for_ranks_in_the_remote_mode() -> None:
    assert remote_code("a\nx", 3, lambda name: name == "t", "t[0] --raw") == RemoteCode("t[0]", "a\nx", 3)
    assert remote_code("%%local\nx", 9, lambda name: name == "t", "t") is None


@pytest.mark.parametrize(
    "text",
    [
        "x|",
        "%%remote t| \nx",
        "%%remotely\nx|",
        "x\n%%remote\ny|",
        "%remot|",
        "%remote|",
        "%remote t|",
        "%mesh u|",
    ],
)
def test_code_for_the_notebook(text: str) -> None:
    assert at(text) is None
