"""Tests outputs of rich displays: equal ones once, different ones on one page, bounded, and losses noted."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.notebook.output.rate_limit import FoldedItem
from monarch_kernel.notebook.output.rich import (
    BURST,
    MAX_GROUPS,
    MAX_NBYTES,
    MAX_SWITCHED,
    OUR_METADATA,
    Clear,
    RichFolder,
    RichOutput,
    RichSlots,
    compose,
)

PLAIN = {"text/plain": "5"}


SIDE_BY_SIDE = '<div style="display:flex;flex-wrap:wrap;gap:0 2em;align-items:flex-start">'


def shown(data: dict[int, Any], metadata: Any = None) -> list[Any]:
    return [output.data for output in compose({rank: (d, metadata or {}) for rank, d in data.items()})]


class TestCompose:
    def test_texts_are_one_output(self) -> None:
        assert shown({0: PLAIN, 1: PLAIN, 2: {"text/plain": "6\n7"}, 3: {}}) == [
            {"text/plain": "[0-1] 5\n[2] 6\n    7"}
        ]
        assert shown({0: {}}) == []

    def test_equal_displays_are_shown_unchanged(self) -> None:
        page = {"text/html": "<script>x</script>", "text/plain": "x"}
        assert shown({0: page, 2: page}) == [{"text/plain": "[0,2]"}, page]

    def test_different_displays_make_one_page(self) -> None:
        (bundle,) = shown(
            {
                0: {"image/png": "aGk=\n", "text/plain": "<Figure>"},
                1: {"text/html": "<table></table>", "text/plain": " a\n0"},
                2: {"text/plain": "a < b"},
                3: {"image/svg+xml": "<svg/>", "text/plain": "<x.SVG object>"},
            },
            {"image/png": {"width": 30, "height": '1" onload="alert(1)'}},
        )
        assert bundle["text/html"].split("\n") == [
            SIDE_BY_SIDE,
            "<details open><summary><b>[0]</b> &lt;Figure&gt;</summary>"
            '<img src="data:image/png;base64,aGk=" alt="&lt;Figure&gt;" width="30"></details>',
            "<details open><summary><b>[1]</b></summary><table></table></details>",
            "<details open><summary><b>[2]</b> a &lt; b</summary><pre>a &lt; b</pre></details>",
            "<details open><summary><b>[3]</b></summary>"
            '<img src="data:image/svg+xml;base64,PHN2Zy8+" alt=""></details>',
            "</div>",
        ]
        assert bundle["text/plain"] == "[0] <Figure>\n[1]  a\n    0\n[2] a < b\n[3] <x.SVG object>"

    def test_one_click_opens_all_of_many(self) -> None:
        (bundle,) = shown({rank: {"text/html": f"<i>{rank}</i>"} for rank in range(6)})
        items = [f"<details open><summary><b>[{rank}]</b></summary><i>{rank}</i></details>" for rank in range(6)]
        assert bundle["text/html"].split("\n") == [
            *(SIDE_BY_SIDE, *items[:4], "</div>"),
            *("<details><summary>show all: <b>[4-5]</b></summary>", SIDE_BY_SIDE, *items[4:], "</div>", "</details>"),
        ]

    @pytest.mark.parametrize(
        "data",
        [
            {"application/vnd.plotly.v1+json": {}, "text/html": "<b>x</b>"},
            {"text/html": "<script>draw()</script>"},
            {"text/html": "</details>"},
            {"text/html": "<html><body></body></html>"},
            {"text/latex": "$x$", "text/plain": "x"},
        ],
    )
    def test_displays_that_html_cannot_embed_are_shown_one_after_the_other(self, data: dict[str, Any]) -> None:
        other = {"text/html": "<i>fine</i>"}
        assert shown({0: data, 1: other}) == [{"text/plain": "[0]"}, data, {"text/plain": "[1]"}, other]

    def test_many_displays_show_the_first_and_name_the_rest(self) -> None:
        (bundle,) = shown({rank: {"text/html": f"<b>{rank}</b>"} for rank in range(64)})
        assert bundle["text/html"].count("<details open>") == MAX_SWITCHED
        assert bundle["text/html"].count("<details>") == 1
        assert "show more: <b>[4-31]</b>" in bundle["text/html"]
        assert "… and 32 more that differ, of ranks [32-63]" in bundle["text/html"]
        outputs = shown({rank: {"x/y": rank} for rank in range(64)})
        assert len(outputs) == 2 * MAX_GROUPS + 1
        assert "… and 56 more" in outputs[-1]["text/plain"]

    def test_the_displays_of_sixteen_ranks_are_all_shown(self) -> None:
        (bundle,) = shown({rank: {"text/html": f"<b>{rank}</b>"} for rank in range(16)})
        assert "show all: <b>[4-15]</b>" in bundle["text/html"]
        assert all(f"<b>{rank}</b>" in bundle["text/html"] for rank in range(16))
        assert "more that differ" not in bundle["text/html"]

    def test_a_page_is_bounded(self) -> None:
        (bundle,) = shown({rank: {"image/png": f"{rank}" * (3 << 20)} for rank in range(4)})
        assert len(bundle["text/html"]) < MAX_NBYTES
        assert "and 2 more" in bundle["text/html"]

    def test_long_texts_are_cut(self) -> None:
        (bundle,) = shown({rank: {"text/plain": f"{rank}" * (2 << 20)} for rank in range(4)})
        assert len(bundle["text/plain"]) < 1.1 * (1 << 20)
        assert "characters left out here" in bundle["text/plain"]

    @given(st.dictionaries(st.integers(0, 9), st.text("<>&\"'/ab\n"), min_size=2))
    def test_text_of_ranks_is_escaped(self, texts: dict[int, str]) -> None:
        pages = shown({rank: {"image/png": str(rank), "text/plain": text} for rank, text in texts.items()})
        tags: list[str] = []
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
        parser.feed(pages[0]["text/html"])
        assert set(tags) <= {"details", "summary", "b", "div", "img", "p"}


class Ranks:
    """A folder of two ranks that folds their displays immediately."""

    def __init__(self, slots: RichSlots | None = None) -> None:
        self.folder = RichFolder(range(2), slots or RichSlots("slot"), "id")
        self.now = 0.0
        self.notebook: dict[str, Any] = {}
        self.n_messages = 0

    def display(self, data: Any, ranks: tuple[int, ...] = (0, 1), **about: Any) -> list[Any]:
        keys = {self.folder.feed(rank, data, {OUR_METADATA: about} if about else {}) for rank in ranks}
        (key,) = keys
        return self.take(self.folder.take(FoldedItem(ranks, key), self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.folder.release(self.now))

    def finish(self) -> None:
        self.take(self.folder.release(self.now, everything=True))

    def take(self, outputs: list[RichOutput | Clear]) -> list[Any]:
        for output in outputs:
            self.n_messages += 1
            if isinstance(output, Clear):
                self.notebook.clear()
            else:
                id = output.display_id or f"none {self.n_messages}"
                assert output.update == (id in self.notebook), "updates need an existing output"
                self.notebook[id] = output.data
        return outputs


def html(text: str) -> dict[str, str]:
    return {"text/html": text}


def test_late_ranks_join_the_display_of_the_others() -> None:
    ranks = Ranks()
    ranks.display(html("same"), (0,))
    ranks.display(html("same"), (1,))
    ranks.finish()
    assert list(ranks.notebook.values()) == [{"text/plain": "[0-1]"}, html("same")]
    ranks = Ranks()
    ranks.display(html("one"), (1,))
    ranks.display(html("two"), (0,))
    ranks.finish()
    label, page = ranks.notebook.values()
    assert label == {"text/plain": "[0-1]"}
    assert page["text/html"].index("two") < page["text/html"].index("one")


def test_updates_are_drawn_five_times_a_second_and_always_the_last_one() -> None:
    ranks = Ranks()
    ranks.display(html("0"), display_id="x")
    for i in range(1, 1_001):
        ranks.display(html(f"{i}"), display_id="x", update=True)
        ranks.wait(0.001)
    assert ranks.n_messages <= 8
    ranks.finish()
    assert list(ranks.notebook.values()) == [{"text/html": "<div><b>[0-1]</b></div>1000", "text/plain": "[0-1] "}]


def test_an_update_by_one_rank_keeps_what_the_other_shows() -> None:
    slots = RichSlots("slot")
    Ranks(slots).display(PLAIN, display_id="0" * 32)
    ranks = Ranks(slots)
    ranks.notebook["slot-#0"] = PLAIN
    ranks.display({"text/plain": "6"}, (1,), display_id="0" * 32, update=True)
    ranks.finish()
    assert ranks.notebook == {"slot-#0": {"text/plain": "[0] 5\n[1] 6"}}


def test_generated_ids_of_ranks_mean_the_same_display() -> None:
    slots = RichSlots("slot")
    assert slots.name(0, "a" * 32) == slots.name(1, "b" * 32)
    assert slots.name(0, "c" * 32) != slots.name(0, "a" * 32)
    assert slots.name(0, "mine") == slots.name(1, "mine") == "mine"


def test_displays_that_cannot_be_combined_are_updated_for_each_rank() -> None:
    ranks = Ranks()
    for i in range(3):
        ranks.display({"x/y": i}, (0,), display_id="x", update=bool(i))
        ranks.display({"x/y": -i}, (1,), display_id="x", update=bool(i))
        ranks.wait(1.0)
    ranks.finish()
    assert ranks.notebook == {"slot-x-0": {"x/y": 2}, "slot-x-1": {"x/y": -2}}


def test_a_flood_shows_the_first_and_the_last_and_counts_the_rest() -> None:
    ranks = Ranks()
    for i in range(10_000):
        ranks.display(html(f"{i}"))
        ranks.wait(0.0001)
    ranks.finish()
    pages = [data["text/html"] for data in ranks.notebook.values() if "text/html" in data]
    notes = [data["text/plain"] for data in ranks.notebook.values() if "left out" in data.get("text/plain", "")]
    left_out = sum(int(note.split()[1].replace(",", "")) for note in notes)
    assert pages[:BURST] == [f"{i}" for i in range(BURST)]
    assert pages[-10:] == [f"{i}" for i in range(9_990, 10_000)]
    assert len(pages) + left_out == 10_000
    assert ranks.n_messages < 300


def test_large_displays_are_bounded_by_size() -> None:
    ranks = Ranks()
    for i in range(50):
        ranks.display(html(f"{i}" * (1 << 20)))
    ranks.finish()
    assert sum(len(data.get("text/html", "")) for data in ranks.notebook.values()) < (50 << 20)
    assert any("left out here" in data.get("text/plain", "") for data in ranks.notebook.values())


def test_only_ranks_that_showed_output_can_clear_it() -> None:
    ranks = Ranks()
    ranks.display(html("both"))
    ranks.display({}, (0,), clear_output=False)
    assert len(ranks.notebook) == 2, "rank 1 also showed it"
    ranks.display({}, (0, 1), clear_output=True)
    assert ranks.notebook == {}
    ranks.display(html("of 0"), (0,))
    ranks.display({}, (0,), clear_output=False)
    assert ranks.notebook == {}
    ranks.folder.lines_shown([1])
    ranks.display(html("again"), (0,))
    ranks.display({}, (0,), clear_output=False)
    assert len(ranks.notebook) == 2
