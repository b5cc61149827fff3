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
        "%remote t x.y|z": ("t", " x.yz", " x.y"),
        "%remote t[0] x|": ("t[0]", " x", " x"),
        "%remote t|": ("", "t", "t"),
        "a = 1\nv = %remote t x|\nb": ("t", " x", " x"),
    }.items(),
)
def test_code_for_ranks(text: str, found: tuple[str, str, str]) -> None:
    code = at(text)
    assert code is not None
    assert (code.selector, code.code, code.before) == found


@pytest.mark.parametrize(
    "text",
    [
        "x|",
        "%%remote t| \nx",
        "%%remotely\nx|",
        "x\n%%remote\ny|",
        "%remot|",
        "%remote|",
        "%%remote t --no\nx|",
        "%mesh u|",
    ],
)
def test_code_for_the_notebook(text: str) -> None:
    assert at(text) is None
