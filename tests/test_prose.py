"""The project's texts and names are plain technical English; `tests/support/prose.py` has the rules."""

from __future__ import annotations

import pytest

from tests.support.prose import check_project, check_python, check_text


def test_texts_and_names_are_plain_english() -> None:
    findings = check_project()
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The rank is told of it.", ["is told"]),
        ("It is soon told.", ["is soon told"]),
        ("A rank who fails", ["who"]),
        ("A reader who opens this, somebody who does not, and users, who do", []),
        ("It starts anew,\nof its\nown accord", ["anew", "of its own accord"]),
        ("whose memory", []),
        ("well-begun half-roads", []),
    ],
)
def test_a_text_is_checked_by_words(text: str, words: list[str]) -> None:
    assert [found for _, found, _ in check_text(text)] == words


def test_a_python_file_is_checked_by_comments_texts_and_names() -> None:
    source = '"""Docstring\n\nof what has begun."""\n\nis_told = f"{1} in"  # nothing is\n# told in vain\nclass NewRoad: ...\n'
    assert [(line, words) for line, words, _ in check_python(source)] == [
        (3, "begun"),
        (5, "is told"),
        (5, "is told"),
        (6, "in vain"),
        (7, "road"),
    ]
