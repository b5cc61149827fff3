"""What ranks display can't break out of the page that shows several of them, nor be taken for a command."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.actor import ProcMesh
from monarch_kernel.notebook.output.mime import checked, embedded, nbytes
from monarch_kernel.notebook.output.rate_limit import FoldedItem
from monarch_kernel.notebook.output.rich import OUR_METADATA, RichFolder, RichOutput, RichSlots, compose
from tests.support.waiting import LONG_S

SCRIPT = '"><script>alert(1)</script>'
BINARY = (
    "image/png",
    "image/jpeg",
    "image/gif",
    "image/webp",
    "image/bmp",
    "audio/wav",
    "video/mp4",
    "application/pdf",
)
UNCLOSED = [
    "<!-- a",
    "<!-->a",
    "<!-- a -- > b",
    '<a title="<!--" href="x"></div></div><b title="-->">x</b></a>',
    "<div>",
    "</div>",
    "<div></details>",
    "<b><i></b></i>",
    "<div/>",
    "<a href='",
    "<a title=\"x\"y='>'>x</a>",
    "<img src=x",
    "<style>a",
    "<textarea>",
    "<title>",
    "<plaintext>",
    "<template><p></template>",
    "<select><option>x",
    "<noscript>",
    "<script>x</script>",
    "<iframe></iframe>",
    "<base href='https://example.org/'>",
    "<svg><style><a title='</style>'><b></svg>",
    "<svg><p><b/></p></svg>",
    "<?x",
    "a\0b",
    "<table><tr><td>x",
]
CLOSED = [
    "",
    "a &lt; b &amp; c",
    "<p>one<p>two<br/><hr>",
    "<ul><li>one<li>two</ul>",
    '<table border="1" class=dataframe><thead><tr><th>a<tbody><tr><td>1</td></tr></table>',
    "<style scoped>.a > b { color: red }</style><div class='a'><b>x</b></div>",
    '<svg viewBox="0 0 1 1"><g><path d="M0 0"/></g></svg>',
    '<img src="data:image/png;base64,aGk=" alt="x">',
    "<details><summary>x</summary>y</details>",
]


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def pages(*bundles: dict[str, Any]) -> list[Any]:
    return [output.data for output in compose({rank: (data, {}) for rank, data in enumerate(bundles)})]


@pytest.mark.parametrize("mime", BINARY)
@pytest.mark.parametrize("value", [SCRIPT, f"aGk={SCRIPT}", "aGk=\0", "aGk", None, 5, ["aGk="], {"a": 1}, b"aGk="])
def test_images_that_are_no_base64_are_left_out(mime: str, value: Any) -> None:
    good = value == "aGk"
    for bundles in ([{mime: value}], [{mime: value}, {mime: "AAAA"}], [{mime: value, "text/plain": "x"}] * 2):
        for data in pages(*bundles):
            assert data.get(mime) in (None, "AAAA", *["aGk"] * good)
            assert "script" not in Page(data.get("text/html", "")).tags
    kept, _ = checked({mime: value, "text/plain": "x"}, {})
    assert kept == ({mime: value, "text/plain": "x"} if good else {"text/plain": kept["text/plain"]})
    assert good or re.fullmatch(rf"x\n… left out here: {mime} \(not (base64|a text)\)", kept["text/plain"])


@pytest.mark.parametrize(
    "mime", ["text/plain", "text/html", "image/svg+xml", "text/markdown", "application/javascript"]
)
def test_texts_that_are_no_texts_are_left_out(mime: str) -> None:
    assert checked({mime: {"a": 1}}, {})[0] == {"text/plain": f"… left out here: {mime} (not a text)"}


@pytest.mark.parametrize(
    "mime",
    [
        "",
        "text",
        "text/",
        "/html",
        "text/html\n",
        "text/ht ml",
        "a/b/c",
        'text/"><script>',
        "x" * 101 + "/y",
        "text/é",
        5,
        "\x1b]0;t\x07/x",
    ],
)
def test_names_that_are_no_mime_types_are_left_out(mime: Any) -> None:
    kept, _ = checked({mime: "x", "text/html": "<b>x</b>"}, {})
    assert set(kept) == {"text/html", "text/plain"}
    assert "(not a MIME type)" in kept["text/plain"]
    assert "\n" not in kept["text/plain"]
    assert "\x1b" not in kept["text/plain"]
    assert len(kept["text/plain"]) < 200


def test_many_bad_parts_are_one_short_note() -> None:
    kept, _ = checked({f"bad {i}": "x" for i in range(10_000)}, {})
    assert kept["text/plain"].endswith("bad 3 (not a MIME type) and 9,996 more")


def test_parts_that_the_frontend_knows_pass() -> None:
    bundle = {
        "application/json": {"a": [1]},
        "application/vnd.plotly.v1+json": {"data": []},
        "application/geo+json": {},
        "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
        "text/html; charset=utf-8": "<p>",
        "image/svg+xml": "<svg/>",
        "text/plain": "\x1b[31mred\x1b[0m",
    }
    assert checked(bundle, {"isolated": True}) == (bundle, {"isolated": True})


def test_numbers_that_json_lacks_are_null() -> None:
    chart = {"data": [{"y": [1, 0.5, math.nan]}], "range": [-math.inf, math.inf], "text": "NaN"}
    data, metadata = checked({"application/vnd.plotly.v1+json": chart}, {"scale": math.nan, "isolated": True})
    assert data["application/vnd.plotly.v1+json"] == {
        "data": [{"y": [1, 0.5, None]}],
        "range": [None, None],
        "text": "NaN",
    }
    assert metadata == {"scale": None, "isolated": True}


def test_text_of_a_display_has_no_terminal_controls() -> None:
    assert checked({"text/plain": "a\x1b]0;t\x07\x1b[2Jb"}, {})[0] == {"text/plain": "ab"}


@pytest.mark.parametrize("text", UNCLOSED)
def test_html_that_is_not_closed_stands_alone(text: str) -> None:
    assert embedded({"text/html": text}, {}) is None
    label, first, *_ = pages({"text/html": text}, {"text/html": "<b>x</b>"})
    assert label == {"text/plain": "[0]"}
    assert first == {"text/html": text}


@pytest.mark.parametrize("text", CLOSED)
def test_html_that_is_closed_is_part_of_a_page(text: str) -> None:
    (page,) = pages({"text/html": text}, {"text/html": "<b>x</b>"})
    assert page["text/html"].count(text) >= 1
    assert Page(page["text/html"]).tags.count("summary") >= 2


@given(st.lists(st.text("<>/\"'=! -?a&;bdiv\n") | st.sampled_from([*UNCLOSED, *CLOSED]), max_size=4).map("".join))
def test_no_html_of_a_rank_hides_that_of_another(text: str) -> None:
    outputs = pages({"text/html": text}, {"text/html": "<ins>other</ins>"})
    if len(outputs) == 1:
        assert outputs[0]["text/html"].endswith("<ins>other</ins></details>\n</div>")
        assert Page(outputs[0]["text/html"]).tags.count("ins") == 1 + text.count("<ins>")


@pytest.mark.parametrize(
    "about", [None, 5, "clear_output", ["clear_output"], {"clear_output": SCRIPT}, {"display_id": 5}]
)
def test_metadata_of_the_user_is_no_command(about: Any) -> None:
    folder = RichFolder([0], RichSlots("prefix"), "cell")
    key = folder.feed(0, {"text/plain": "x"}, {OUR_METADATA: about})
    assert folder.take(FoldedItem((0,), key), 0.0)


@pytest.mark.parametrize("id", ["a\nb", "a\n1", "#0", "", "a b", SCRIPT, "x" * 10_000_000, "\udcff"])
def test_ids_of_displays_are_names_only(id: str) -> None:
    slots = RichSlots("prefix")
    assert slots.name(0, "0" * 32) == "#0"
    name = slots.name(0, id)
    assert re.fullmatch(r"[=\w]{1,100}", name)
    assert name not in ("#0", "a")
    assert slots.name(1, id) == name


def test_an_update_finds_its_display_whatever_the_id() -> None:
    folder = RichFolder([0], RichSlots("prefix"), "cell")
    outputs = []
    for i, id in enumerate(["a\nb", "a\nc", "a\nb"]):
        about = {OUR_METADATA: {"display_id": id, "update": i == 2}}
        key = folder.feed(0, {"text/plain": f"{i}"}, about)
        outputs += folder.take(FoldedItem((0,), key), float(i))
    assert all(isinstance(output, RichOutput) for output in outputs)
    first, second, third = outputs
    assert first.display_id == third.display_id != second.display_id  # type: ignore[union-attr]
    assert third.update  # type: ignore[union-attr]


def test_generated_ids_are_bounded() -> None:
    slots = RichSlots("prefix")
    names = {slots.name(0, f"{i:032x}") for i in range(20_000)}
    assert len(names) == 20_000
    assert len(slots._generated[0]) == 10_000


def test_values_that_are_no_texts_count_with_their_size() -> None:
    assert nbytes("abc") == 3
    assert nbytes({"a": ["x" * 1000] * 1000}) > 1_000_000


ODD_KEYS = """
from IPython.display import publish_display_data
class Odd:
    def _repr_mimebundle_(self, **_): return {5: 5, "application/x+json": {("a",): 1}}
for i in range(100):
    publish_display_data({5: 5}, {("a",): 1})
    print(i)
Odd()
"""


def test_keys_that_are_no_texts_lose_no_other_message(procs: ProcMesh) -> None:
    """A message that the controller can't read would be dropped, with the answer of the cell in the same batch."""
    results = procs.run_cell(ODD_KEYS, cell=1).get(LONG_S)
    for result in results.values():
        assert set(result.bundle) == {"5", "application/x+json", "text/plain"}
        assert checked(result.bundle, {})[0]["application/x+json"] == {"('a',)": 1}


def test_keys_that_are_no_texts_are_made_texts_in_the_page() -> None:
    """Otherwise jupyter_client prints a warning into the cell."""
    data = {"application/x+json": {("a",): {1: math.nan}, None: b"x"}}
    assert checked(data, {1: math.inf})[0]["application/x+json"] == {"('a',)": {"1": None}, "null": "eA=="}
    assert checked(data, {1: math.inf})[1] == {"1": None}


def cyclic() -> list[Any]:
    inside: list[Any] = [math.nan]
    inside.append(inside)
    return inside


def deep() -> dict[str, Any]:
    inside: dict[str, Any] = {}
    for _ in range(5000):
        inside = {"k": inside}
    return inside


@pytest.mark.parametrize("make", [cyclic, deep])
def test_a_structure_that_is_no_json_is_left_out_with_a_note(make: Any) -> None:
    data, metadata = checked({"application/vnd.x+json": make(), "text/plain": "a"}, {"about": make(), "isolated": True})
    assert data == {
        "text/plain": "a\n… left out here: application/vnd.x+json (a structure that is too deep or contains itself)"
    }
    assert metadata == {"isolated": True}
