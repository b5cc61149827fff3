"""Hints below errors: one way out has one spelling."""

from __future__ import annotations

import pytest

from monarch_kernel.notebook.magics.name_hints import without_heal


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        (
            "pulling 'x' from t failed: it was not sent, because [1] is gone; slice it out, or heal the mesh (.heal())",
            "pulling 'x' from t failed: it was not sent, because [1] is gone; slice it out",
        ),
        (
            "cell [5] failed on t: it was not sent, because [1] is gone, and it needs all ranks: heal the mesh (.heal())",
            "cell [5] failed on t: it was not sent, because [1] is gone, and it needs all ranks",
        ),
        (
            "t can't hold tensors: replace its dead ranks with .heal()",
            "t can't hold tensors: replace its dead ranks",
        ),
        (
            "the tensors of t can't be used: [1] ended, ...; replace it with .heal(), and make them again",
            "the tensors of t can't be used: [1] ended, ...; replace it, and make them again",
        ),
        ("cell [5] failed on t", "cell [5] failed on t"),
    ],
)
def test_the_method_that_heals_is_left_out_where_the_magic_is_named(what: str, shown: str) -> None:
    assert without_heal(what) == shown
