"""Tests which part of a cell is code for ranks."""

from __future__ import annotations

import pytest

from monarch_kernel.notebook.magics.remote_names import RemoteCode, _keys, _matching, remote_code


def at(text: str, mode: str | None = None) -> RemoteCode | None:
    """Find the code at the cursor, which ``|`` marks."""
    cursor = text.index("|")
    return remote_code(text.replace("|", ""), cursor, lambda name: name == "t", mode)


@pytest.mark.parametrize(
    ("text", "found"),
    {
        "%%remote\nx|": ("", "", "x", "x"),
        "%%remote t[0, 1] --raw\na\nb|c\nd": ("t[0, 1]", "", "a\nbc\nd", "b"),
        "%%remote t --targets 1-2\nx|": ("t", "1-2", "x", "x"),
        "%%remote t --wro\nx|": ("t", "", "x", "x"),
        "\n\n%%remote t\n|": ("t", "", "", ""),
        "%remote x|": ("", "", "x", "x"),
        "%remote t x.y|z": ("t", "", "x.yz", "x.y"),
        "%remote --targets 1 t x|": ("t", "1", "x", "x"),
        "%remote t[0] x |": ("t[0]", "", "x ", "x "),
        "a = 1\nv = %remote t x|\nb": ("t", "", "x", "x"),
    }.items(),
)
def test_code_for_ranks(text: str, found: tuple[str, ...]) -> None:
    code = at(text)
    assert code is not None
    assert (code.selector, code.targets, code.code, code.before) == found


@pytest.mark.parametrize(
    "text",
    [
        "x|",
        "%%remote --o|",
        "%%remote t| \nx",
        "%%remotely\nx|",
        "x\n%%remote\ny|",
        "%remot|",
        "%remote t|",
        "%mesh u|",
        "v| = %remote x",
    ],
)
def test_code_for_the_notebook(text: str) -> None:
    assert at(text) is None


def test_autoremote() -> None:
    code = at("x = 1\ny|", "t --targets 0")
    assert code is not None
    assert (code.selector, code.targets, code.before) == ("t", "0", "y")
    assert at("%%local\ny|", "t") is None


@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_keys_that_would_end_their_string_or_line_are_not_offered(quote: str) -> None:
    odd = ['a"]; run() #', "a'", "a\\", "a\nb", "a\rb", "\x1b]0;t\x07", "a\u2028b", "a\u202eb", "\0"]
    found = _keys([(key, "int") for key in ("good", "two words", *odd)], quote, "")
    written = [text.strip('"') for text, _ in found.matches]
    assert written == ["good", "two words"]


def test_names_that_no_line_can_show_are_not_offered() -> None:
    known = [(name, "int") for name in ("", "good", "g\x1b]0;t\x07", "g\nx", "_g")]
    assert _matching(known, "g").matches == [("good", "int")]
    assert [name for name, _ in _matching(known, "").matches] == ["", "good"]
