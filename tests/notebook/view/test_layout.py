"""Tests the layout of the view in a real browser: no box leaves its place or covers another, at any size of mesh and page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_kernel.base.events import MeshView, WaitView
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.view.frames import ViewState, curves_message
from monarch_kernel.notebook.view.text import mesh_html
from tests.notebook.view.gallery import loop
from tests.notebook.view.pages import AT, ViewPage, all_in, browser, drawn, history, training, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a browser")]

COUNTS = (1, 2, 4, 8, 16, 64, 1024)
WIDTHS = (116, 160, 240, 320, 400, 560, 640, 800, 900, 1024, 1120, 1280, 1400, 1680, 1920)

BOXES = """() => {
    const root = document.getElementById("root");
    const page = root.getBoundingClientRect();
    const cut = new Map([[root, false]]);
    const isCut = (each) => {
        if (!cut.has(each)) cut.set(each, getComputedStyle(each).clipPath !== "none" || isCut(each.parentElement));
        return cut.get(each);
    };
    const isSeen = (each) => each.getClientRects().length > 0 && getComputedStyle(each).visibility !== "hidden" && !isCut(each);
    const name = (each) => `${each.getAttribute("class") || each.tagName} "${each.textContent.slice(0, 30)}"`;
    const all = [...root.querySelectorAll("*")].filter((each) => isSeen(each) && !each.ownerSVGElement);
    const isText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    // What a person sees of an element: its pictures and lines of text, cut where the element or its parent cuts them.
    const cuts = (each) => getComputedStyle(each).overflowX !== "visible";
    const boxesOf = (each) => {
        const own = each.getBoundingClientRect();
        if (!isText(each)) return [own];
        const range = document.createRange();
        range.selectNodeContents(each);
        const cutting = [each, each.parentElement].find(cuts);
        const edge = cutting?.getBoundingClientRect() ?? { left: -1e9, right: 1e9, top: -1e9, bottom: 1e9 };
        return [...range.getClientRects()].map((box) => ({
            left: Math.max(box.left, edge.left), right: Math.min(box.right, edge.right),
            top: Math.max(box.top, edge.top), bottom: Math.min(box.bottom, edge.bottom) }));
    };
    const isPicture = (each) => each instanceof SVGElement || ["INPUT", "BUTTON", "CANVAS"].includes(each.tagName);
    const leaves = all.filter((each) => isText(each) || isPicture(each));
    const boxes = new Map(leaves.map((each) => [each, boxesOf(each)]));
    const outside = [], covered = [];
    for (const [leaf, its] of boxes) {
        const around = leaf.closest(".mk-card, .mk-curve, .mk-loop, .mk-inspector, .mk-reply, .mk-note");
        for (const frame of [page, ...(around ? [around.getBoundingClientRect()] : [])]) {
            const leaves = (box) => box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
            if (its.some(leaves)) outside.push(name(leaf));
        }
    }
    for (let i = 0; i < leaves.length; i++) {
        for (let j = i + 1; j < Math.min(leaves.length, i + 60); j++) {
            if (leaves[i].contains(leaves[j])) continue;
            const meets = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
            if (boxes.get(leaves[i]).some((a) => boxes.get(leaves[j]).some((b) => meets(a, b)))) {
                covered.push(`${name(leaves[i])} and ${name(leaves[j])}`);
            }
        }
    }
    const cards = [...root.querySelectorAll(".mk-card")].map((each) => each.getBoundingClientRect());
    const isLarge = ({ width, height }) => width > 0 && height > 4;
    const isEmpty = (each) => !each.textContent.trim() && !each.querySelector("svg") && isLarge(each.getBoundingClientRect());
    return {
        outside, covered,
        empty: all.filter((each) => each.closest(".mk-card") && !(each instanceof SVGElement) && isEmpty(each)).map(name),
        columns: new Set(cards.map((box) => Math.round(box.left))).size,
        rows: new Set(cards.map((box) => Math.round(box.top))).size,
        narrowest: Math.min(...cards.map((box) => box.width)),
        cards: cards.length ? Math.max(...cards.map((box) => box.bottom)) - cards[0].top : 0,
        height: page.height,
        widest: document.documentElement.scrollWidth,
    };
}"""
"""Measures all that is seen. Elements that are there for screen readers alone take no part."""


@pytest.fixture(scope="module")
def page() -> Iterator[ViewPage]:
    with browser() as found:
        yield ViewPage(found)


def training_in(view: MeshView) -> Callable[[ViewPage], None]:
    """Show a mesh that has received and sent for a minute."""

    def show(page: ViewPage) -> None:
        frame = drawn(view)
        page.receive({"kind": "history", "meshes": {view.name: history(frame.in_rate, frame.out_rate)}})
        page.play([ViewState(AT - 2 + second, (frame,), second) for second in range(3)])

    return show


def with_loop(page: ViewPage) -> None:
    view = dataclasses.replace(training(4), loops=(loop(),))
    page.frame(ViewState(AT, (drawn(view),)))
    page.receive(curves_message(view.name, view.loops))


def troubled(count: int) -> MeshView:
    return training(count, failed=(0,), dead=(1,) if count > 1 else ())


def hung(count: int) -> MeshView:
    """Make a mesh of ranks that wait for the last one, or for none."""
    others = tuple(range(count - 1))
    text = f"{format_ranks(others)} wait for 36 s in all_reduce #2 (shape 4096x4096), cell [12], line 9; "
    wait = WaitView(
        f"{text}[{count - 1}] has not started it: cell [12], line 5: batch = next(batches)", others, (count - 1,)
    )
    return dataclasses.replace(training(count), waits=(wait,))


SCENES: dict[str, Callable[[ViewPage], None]] = {
    **{f"{count} training": training_in(training(count)) for count in COUNTS},
    **{f"{count} in trouble": training_in(troubled(count)) for count in COUNTS},
    **{f"{count} hung": training_in(hung(count)) for count in (2, 4, 8, 1024)},
    **{f"{count} idle": training_in(all_in(count, "idle")) for count in (1, 4, 8)},
    "8 starting": training_in(all_in(8, "starting")),
    "loop": with_loop,
}


def measured(page: ViewPage, width: int) -> dict[str, Any]:
    page.resize(width)
    found: dict[str, Any] = page.page.evaluate(BOXES)
    return found


@pytest.mark.parametrize("scene", SCENES)
def test_nothing_leaves_its_place_or_covers_another(page: ViewPage, scene: str) -> None:
    page.page.evaluate("localStorage.clear()")
    page.start()
    SCENES[scene](page)
    wrong = {}
    turn = page.page.get_by_role("button", name="Compact").or_(page.page.get_by_role("button", name="Full cards"))
    for width in WIDTHS:
        for density in ("first", "other"):
            found = measured(page, width)
            bad = {what: sorted(set(found[what]))[:4] for what in ("outside", "covered", "empty") if found[what]}
            if bad or found["widest"] > width:
                wrong[width, density] = bad or {"widest": found["widest"]}
            if not turn.is_visible():
                break
            turn.evaluate("button => button.click()")  # a click of the mouse would take longer than the measurement
    assert wrong == {}


@pytest.mark.parametrize(
    ("count", "columns"),
    [
        (1, {240: 1, 800: 1, 1920: 1}),
        (2, {240: 1, 400: 1, 560: 2, 1920: 2}),
        (4, {240: 1, 400: 1, 560: 2, 1120: 2, 1280: 4, 1400: 4, 1920: 4}),
        (8, {240: 1, 560: 2, 800: 2, 1024: 4, 1400: 4, 1920: 4}),
        (16, {240: 1, 560: 2, 1024: 4, 1400: 4, 1920: 4}),
    ],
)
def test_cards_fill_rows_of_equal_length(page: ViewPage, count: int, columns: dict[int, int]) -> None:
    page.page.evaluate("localStorage.clear()")
    page.start()
    training_in(training(count))(page)
    found = {width: measured(page, width) for width in columns}
    assert {width: each["columns"] for width, each in found.items()} == columns
    assert {width: each["rows"] for width, each in found.items()} == {width: count // n for width, n in columns.items()}


@pytest.mark.parametrize("width", [700, 800, 900, 1024, 1120, 1280, 1400])
def test_eight_cards_take_a_third_of_a_page(page: ViewPage, width: int) -> None:
    page.page.evaluate("localStorage.clear()")
    page.start()
    training_in(training(8))(page)
    assert measured(page, width)["cards"] < 300


def test_the_cards_of_seven_ranks_take_the_least_rows(page: ViewPage) -> None:
    view = training(8)
    page.page.evaluate("localStorage.clear()")
    page.start()
    training_in(dataclasses.replace(view, axes=(("gpus", 7),), ranks=view.ranks[:7]))(page)
    found = measured(page, 1400)
    assert (found["columns"], found["rows"]) == (4, 2)


def test_the_user_chooses_between_compact_and_full_cards_and_the_page_keeps_it(page: ViewPage) -> None:
    page.page.evaluate("localStorage.clear()")
    page.resize(800)
    for choice, other in (("Full cards", "Compact"), ("Compact", "Full cards")):
        page.start()
        training_in(training(8))(page)
        page.page.get_by_role("button", name=choice).click()
        assert page.page.get_by_role("button", name=other).is_visible()
        is_compact = choice == "Compact"
        assert page.page.get_by_text("pid 41200").is_visible() is not is_compact
        page.resize(1400)
        assert page.page.get_by_text("pid 41200").is_visible() is not is_compact
        page.start()
        page.resize(800)
        training_in(training(8))(page)
        assert page.page.get_by_text("pid 41200").is_visible() is not is_compact


@pytest.mark.parametrize("width", [240, 1100])
def test_a_compact_card_has_room_for_the_wait_or_the_error(page: ViewPage, width: int) -> None:
    page.resize(width)
    page.start()
    page.frame(ViewState(AT, (drawn(training(16, failed=(3,))),)))
    cards = page.page.locator(".mk-card")
    assert cards.nth(0).locator(".mk-activity").inner_text() == "waits in all_reduce"
    assert not cards.nth(3).locator(".mk-error-time").is_visible()
    assert cards.nth(3).locator(".mk-error").inner_text().startswith("torch.OutOfMemoryError")
    cards.nth(3).get_by_role("button", name="Actions for rank 3").click()
    assert cards.nth(3).locator(".mk-error-time").is_visible()


@pytest.mark.parametrize("width", [240, 1100])
def test_a_compact_card_shows_what_its_rank_does_in_place_of_an_earlier_error(page: ViewPage, width: int) -> None:
    page.page.evaluate("localStorage.clear()")
    page.resize(width)
    page.start()
    mesh = hung(16)
    earlier = tuple(each._replace(last_error="ValueError: of an earlier cell", failed_s=90.0) for each in mesh.ranks)
    waits = tuple(each._replace(ranks=(0, 1, 3), missing=(2,)) for each in mesh.waits)
    page.frame(ViewState(AT, (drawn(dataclasses.replace(mesh, ranks=earlier, waits=waits)),)))
    cards = page.page.locator(".mk-card")
    assert cards.nth(0).locator(".mk-stall").is_visible()
    assert cards.nth(4).locator(".mk-activity").is_visible()
    for i in (0, 4):
        assert not cards.nth(i).locator(".mk-error").is_visible()
    assert cards.nth(4).locator(".mk-usage").is_visible()
    cards.nth(0).get_by_role("button", name="Actions for rank 0").click()
    assert cards.nth(0).locator(".mk-error").is_visible()


@pytest.mark.parametrize("width", [240, 1400])
def test_the_cards_of_waiting_ranks_show_the_whole_wait_where_no_rank_is_missing(page: ViewPage, width: int) -> None:
    page.page.evaluate("localStorage.clear()")
    page.resize(width)
    page.start()
    mesh = hung(4)
    text = mesh.waits[0].text.replace("has not started it", "has sent another shape (4096x2048)")
    training_in(dataclasses.replace(mesh, waits=(WaitView(text, (0, 1, 2, 3)),)))(page)  # no rank is missing
    waits = page.page.locator(".mk-card .mk-stall")
    assert waits.count() == 4
    for i in range(4):
        assert waits.nth(i).evaluate("each => each.scrollHeight <= each.clientHeight + 1"), waits.nth(i).inner_text()
        assert waits.nth(i).evaluate("each => each.scrollWidth <= each.clientWidth + 1"), waits.nth(i).inner_text()


def test_an_opened_compact_card_shows_all_that_it_has(page: ViewPage) -> None:
    page.page.evaluate("localStorage.clear()")
    page.resize(800)
    page.start()
    training_in(training(8))(page)
    card = page.page.locator(".mk-card[data-rank='3']")
    assert not card.get_by_text("step 1240").is_visible()
    card.get_by_role("button", name="Actions for rank 3").click()
    for text in ("step 1240", "pid 41203", "gpu mem", "Interrupt", "Logs"):
        assert card.get_by_text(text).is_visible()


def test_a_view_on_a_page_that_stores_nothing_works(page: ViewPage) -> None:
    page.page.evaluate("""() => {
        window.stored = Object.getOwnPropertyDescriptor(window, "localStorage");
        Object.defineProperty(window, "localStorage", { configurable: true, get() { throw new DOMException("denied"); } });
    }""")
    try:
        page.resize(800)
        page.start()
        training_in(training(8))(page)
        page.page.get_by_role("button", name="Full cards").click()
        assert page.page.get_by_role("button", name="Compact").is_visible()
    finally:
        page.page.evaluate("Object.defineProperty(window, 'localStorage', window.stored)")
    assert page.errors == []


@pytest.mark.parametrize("width", [200, 400, 1000])
def test_the_saved_table_shows_all_of_its_caption_at_any_width(page: ViewPage, width: int) -> None:
    saved = page.page.context.new_page()
    saved.set_viewport_size({"width": width, "height": 700})
    saved.set_content(mesh_html(training(4, failed=(2,)), AT))
    caption = saved.evaluate(
        """() => {
            const range = document.createRange();
            range.selectNodeContents(document.querySelector("caption"));
            const rows = document.querySelector("tbody").getBoundingClientRect();
            return { right: range.getBoundingClientRect().right, bottom: range.getBoundingClientRect().bottom, top: rows.top,
                page: document.documentElement.scrollWidth };
        }"""
    )
    assert caption["right"] <= caption["page"] == width
    assert caption["bottom"] <= caption["top"]
    saved.close()
