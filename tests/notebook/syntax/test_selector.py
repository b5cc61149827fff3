"""Tests selectors without processes: their syntax and meaning, and that invalid ones run nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.selector import evaluate, pick_ranks


class Witness(ValueMesh[int]):
    """A mesh that fails if anything but its algebra is used."""

    def __getitem__(self, key: Any) -> Any:
        return self._with_region(self._region.index(key))

    def stop(self) -> None:
        raise AssertionError("it was run")

    @property
    def prop(self) -> None:
        raise AssertionError("it was read")


T = Witness({"dp": 2, "tp": 4}, range(8))
NAMES: dict[str, Any] = {
    "t": T,
    "half": T.slice(dp=0),
    "n": 2,
    "spans": slice(1, 3),
    "some": [0, 1],
    "text": "x",
    "stop": T.stop,
    "meshes": {"a": T},
}


@pytest.mark.parametrize(
    ("selector", "values"),
    [
        ("t", range(8)),
        (" t ", range(8)),
        ("half", range(4)),
        ("t[0]", range(4)),
        ("t[-1]", range(4, 8)),
        ("t[1, 0:2]", (4, 5)),
        ("t[:, ::2]", (0, 2, 4, 6)),
        ("t[0:None, 0]", (0, 4)),
        ("t[:, spans]", (1, 2, 5, 6)),
        ("t[n - 1]", range(4, 8)),
        ("t[:, n//2*2:]", (2, 3, 6, 7)),
        ("t.slice(dp=1)", range(4, 8)),
        ("t.slice(tp=slice(0, n))", (0, 1, 4, 5)),
        ("t.slice(dp=1)[1:3]", (5, 6)),
        ("t.flatten('all')[2:4]", (2, 3)),
        ("t.rename(dp='pp').slice(pp=0)", range(4)),
        ("t.split(tp=('a', 'b'), b=2).slice(a=1)", (2, 3, 6, 7)),
    ],
)
def test_names_indices_and_mesh_algebra_are_read(selector: str, values: Any) -> None:
    assert evaluate(selector, NAMES).values() == tuple(values)


@pytest.mark.parametrize(
    "selector",
    [
        "t.stop()",
        "t.prop",
        "t[stop()]",
        "t[t.stop():1]",
        "t.slice(dp=stop())",
        "t.slice(**meshes)",
        "t[*some]",
        "t[(x := 1)]",
        "stop()",
        "t if t.stop() else t",
        "[t.stop() for i in some]",
        "lambda: t",
        "t[f'{stop()}']",
        "t['x']",
        "t[0.5]",
        "t[~0]",
        "t[2 ** 999999999]",
        "1 + 1",
        "t[",
        "meshes['a']",
        "t.slice",
        "t.slice(dp=slice())",
    ],
)
def test_anything_else_is_refused_in_one_line_and_not_run(selector: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        evaluate(selector, NAMES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        (
            "t.stop()",
            "'t.stop()' selects no mesh; write a name and, if needed, a slice, such as t[0:2] or t.slice(...)",
        ),
        ("t[stop()]", "'t[stop()]' selects no mesh: stop() is not evaluated here; write a name"),
        ("t[dp=1]", "'t[dp=1]' selects no mesh: an index has no names; write t.slice(dp=1)"),
        (
            "t[dp=1, tp=:2]",
            "'t[dp=1, tp=:2]' selects no mesh: an index has no names; write t.slice(dp=1, tp=slice(None, 2))",
        ),
        ("t[tp=n-1]", "'t[tp=n-1]' selects no mesh: an index has no names; write t.slice(tp=n-1)"),
        ("t[1, tp=0]", "'t[1, tp=0]' selects no mesh; write a name and, if needed, a slice, such as t[0:2]"),
        ("t[dp=)]", "'t[dp=)]' selects no mesh; write a name and, if needed, a slice, such as t[0:2]"),
        ("t[9]", "t[9]: axis 'dp' has size 2: index 9 is out of range -2 to 1"),
        ("t[k]", "t[k]: there is no variable 'k' in the kernel"),
        ("t[text]", "t[text]: text is a str; an index is an int, a slice or a list"),
        ("text[0]", "text[0]: text is a str, not a mesh"),
        ("t.slice(pp=0)", "t.slice(pp=0): slice() got an unknown axis 'pp'"),
        ("t[1//0]", "t[1//0]: "),
        ("t.flatten()", "t.flatten(): "),
    ],
)
def test_a_refusal_says_what_is_wrong(selector: str, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        evaluate(selector, NAMES)
    assert str(caught.value).startswith(says)


@given(st.text(alphabet="t[](){}:,.0129-+*/'\"= slicefkm#\\\n", max_size=30))
def test_any_text_is_read_or_refused_with_a_message(text: str) -> None:
    try:
        evaluate(text, NAMES)
    except UsageProblem as problem:
        assert str(problem)


@pytest.mark.parametrize(
    ("targets", "ranks", "places"),
    [
        ("0,2", range(4), [0, 2]),
        ("2,0,2", range(4), [2, 0]),
        ("1-3", range(4), [1, 2, 3]),
        ("0:4:2", range(4), [0, 2]),
        (":", range(4), [0, 1, 2, 3]),
        ("-1:", range(4), [3]),
        ("0,2-3", range(4), [0, 2, 3]),
        ("[0,1]", range(4), [0, 1]),
        ("[0, 1]", range(4), [0, 1]),
        ("2,5", (2, 3, 5), [0, 2]),
        ("0:4", (2, 3, 5), [0, 1]),
    ],
)
def test_targets_use_the_rank_numbers_of_the_output(targets: str, ranks: Any, places: list[int]) -> None:
    assert pick_ranks(targets, ranks) == places


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ("4", "--targets 4: there is no rank 4; available: [0-3]"),
        ("0-99999999999", "there is no rank 4; available: [0-3]"),
        ("99999999999-0", "selects no rank; available: [0-3]"),
        ("2:2", "--targets 2:2 selects no rank; available: [0-3]"),
        ("::0", "the step of a slice must be at least 1"),
        ("two", "--targets takes ranks, such as 0,2 or 1-3 or 0:4:2 or all, not 'two'"),
        ("0,", "--targets takes ranks"),
        ("-1", "--targets takes ranks"),
    ],
)
def test_unknown_targets_are_named(targets: str, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        pick_ranks(targets, range(4))
    assert says in str(caught.value)
