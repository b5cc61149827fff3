"""Displays of ranks: in order, merged if equal, with a switcher if not, updated, cleared, and limited in size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from monarch_kernel.notebook.output import rich

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook

pytestmark = pytest.mark.timeout(120)

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMPORTS = "import time\nfrom IPython.display import HTML, Image, clear_output, display, update_display\n"


def outputs(cell: Cell) -> list[Any]:
    """The final output of a cell, as in a notebook: text, or data of displays, after updates and clears."""
    found: list[Any] = []
    places: dict[str, int] = {}
    clear_next = False
    for message in cell.messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "clear_output":
            clear_next = True
            if content["wait"]:
                continue
        if clear_next:
            found.clear()
            places.clear()
            clear_next = False
        if kind == "stream":
            found.append(content["text"])
        elif kind == "display_data":
            places[content["transient"].get("display_id", "")] = len(found)
            found.append(content["data"])
        elif kind == "update_display_data":
            place = places.get(content["transient"]["display_id"])
            if place is not None:  # otherwise it is the table of the mesh, in another cell
                found[place] = content["data"]
    return found


def kinds(cell: Cell) -> list[str]:
    return [output if isinstance(output, str) else " ".join(sorted(output)) for output in outputs(cell)]


def test_displays_and_lines_come_in_the_order_of_the_rank(notebook: Notebook) -> None:
    for _ in range(5):
        cell = notebook.ok(
            f"%%remote t[0]\n{IMPORTS}for i in range(3):\n    print('line', i)\n    display(HTML(f'<b>{{i}}</b>'))\n"
            "print('end')"
        )
        order = [o if isinstance(o, str) else o.get("text/html") for o in outputs(cell) if o != {"text/plain": "[0]"}]
        assert order == [
            "[0] line 0\n",
            "<b>0</b>",
            "[0] line 1\n",
            "<b>1</b>",
            "[0] line 2\n",
            "<b>2</b>",
            "[0] end\n",
        ]


def test_different_figures_are_one_output_with_a_switcher(notebook: Notebook) -> None:
    cell = notebook.ok(
        f"%%remote\n{IMPORTS}import base64\nprint('before')\n"
        f"image = base64.b64decode('{PNG}') + bytes([rank])\n"
        "display(Image(data=image, format='png', width=40))\nprint('after')"
    )
    assert kinds(cell) == ["[0-1] before\n", "text/html text/plain", "[0-1] after\n"]
    page = outputs(cell)[1]["text/html"]
    assert re.findall(r"<summary><b>(.*?)</b>", page) == ["[0]", "[1]"]
    assert page.count("<details") == page.count("</details>") == 2
    assert page.count("<details open>") == 2
    assert page.count(f'<img src="data:image/png;base64,{PNG[:60]}') == 2
    assert page.count('width="40"') == 2
    assert outputs(cell)[1]["text/plain"].startswith("[0] <IPython.core.display.Image object>\n[1] <IPython")


def test_a_late_display_joins_the_others(notebook: Notebook, tmp_path: Path) -> None:
    page = "HTML('<b>same</b>' if {} else f'<b>{{rank}}</b>')"

    def displays(is_same: bool) -> Cell:
        """Rank 1 displays its page after the page of rank 0 is shown."""
        gate = tmp_path / f"gate-{is_same}"
        waits = f"import os\nwhile rank and not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        cell = notebook.send(f"%%remote\n{IMPORTS}{waits}display({page.format(is_same)})\nprint('after')")
        cell.wait_for(lambda cell: "after" in cell.stdout)
        gate.touch()
        return cell.wait()

    cell = displays(True)
    assert [o if isinstance(o, str) else o.get("text/html", o["text/plain"]) for o in outputs(cell)] == [
        "[0-1]",
        "<b>same</b>",
        "[0] after\n",
        "[1] after\n",
    ]
    label, switcher, *_ = outputs(displays(False))
    assert label == {"text/plain": "[0-1]"}
    assert switcher["text/html"].count("<details") == 2


def test_equal_figures_are_shown_once_without_changes(notebook: Notebook) -> None:
    cell = notebook.ok(
        f"%%remote\n{IMPORTS}import base64\ndisplay(Image(data=base64.b64decode('{PNG}'), format='png', width=40))"
    )
    label, image = outputs(cell)
    assert label == {"text/plain": "[0-1]"}
    assert image["image/png"] == PNG


def test_unknown_types_are_shown_one_after_the_other(notebook: Notebook) -> None:
    cell = notebook.ok(
        f"%%remote\n{IMPORTS}display({{'application/x-mine': {{'rank': rank}}, 'text/plain': 'mine'}}, raw=True)"
    )
    assert [o.get("application/x-mine", o["text/plain"]) for o in outputs(cell)] == [
        "[0]",
        {"rank": 0},
        "[1]",
        {"rank": 1},
    ]


@pytest.mark.parametrize("id", ["True", "'mine'"])
def test_a_display_is_updated_in_place_for_each_rank(notebook: Notebook, id: str) -> None:
    cell = notebook.ok(
        f"%%remote\n{IMPORTS}handle = display(HTML('same'), display_id={id})\nprint('below')\n"
        "for i in range(60):\n    handle.update(HTML(f'<i>{i * (rank + 1)}</i>')); time.sleep(0.01)"
    )
    assert kinds(cell) == ["text/html text/plain", "[0-1] below\n"]
    assert "<i>59</i>" in outputs(cell)[0]["text/html"]
    assert "<i>118</i>" in outputs(cell)[0]["text/html"]
    assert len(cell.of_type("update_display_data")) < 15 + 20 * cell.elapsed_s, "bounded"


def test_a_later_cell_updates_what_an_earlier_one_displayed(notebook: Notebook) -> None:
    first = notebook.ok(f"%%remote\n{IMPORTS}handle = display('old', display_id='over there')")
    later = notebook.ok("%%remote t[1]\nhandle.update('new')")
    (shown,) = first.of_type("display_data")
    id = shown["content"]["transient"]["display_id"]
    (update,) = (
        message["content"]["data"]
        for message in later.of_type("update_display_data")
        if message["content"]["transient"]["display_id"] == id
    )
    assert update == {"text/plain": "[0] 'old'\n[1] 'new'"}


def test_a_rank_clears_its_own_output(notebook: Notebook, tmp_path: Path) -> None:
    cell = notebook.ok(
        f"%%remote\n{IMPORTS}for i in range(3):\n    print('step', i); clear_output(wait=True)\nprint('done')"
    )
    assert outputs(cell) == ["[0-1] done\n"]
    gate = tmp_path / "gate"
    waits = f"import os\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    cell = notebook.send(
        f"%%remote\n{IMPORTS}print('mine', rank, flush=True)\n{waits}if rank == 0: clear_output(); print('again')"
    )
    cell.wait_for(lambda cell: "mine 0" in cell.stdout and "mine 1" in cell.stdout)
    gate.touch()
    assert cell.wait().ok
    assert "".join(outputs(cell)) == "[0] mine 0\n[1] mine 1\n[0] again\n", "rank 1 did not ask for it"


def test_a_large_display_is_replaced_by_a_note(notebook: Notebook) -> None:
    cell = notebook.ok(f"%%remote t[0]\n{IMPORTS}display(HTML('x' * 50_000_000))\nprint('on')")
    assert "(text/html of 50 MB left out, more than the 8 MB that are shown" in cell.plain
    cell = notebook.ok("%%remote t[0]\nclass Big:\n    def __repr__(self): return 'y' * 100_000_000\nBig()", 60)
    assert "99,737,856 characters left out here" in cell.plain
    assert len(cell.plain) < 300_000


def test_many_displays_are_bounded_and_counted(notebook: Notebook) -> None:
    n = 10_000
    cell = notebook.ok(f"%%remote\n{IMPORTS}for i in range({n}): display(HTML(f'<u>{{i}}</u>'))", 110)
    pages = [output["text/html"] for output in outputs(cell) if "text/html" in output]
    notes = [
        int(match[1].replace(",", ""))
        for output in outputs(cell)
        if (match := re.match(r"… ([\d,]+) displays? left out", output.get("text/plain", "")))
    ]
    assert pages[0] == "<u>0</u>"
    assert pages[-1] == f"<u>{n - 1}</u>"
    assert len(pages) + sum(notes) >= n, "none is lost without being counted"
    assert len(pages) <= rich.BURST + rich.PER_S * cell.elapsed_s + 2 * rich.LAST
    assert len(notes) <= len(pages), "one for each gap"
    assert len(cell.messages) < n / 5, "with labels, and with updates for the ranks that are late"


def test_different_displays_of_many_ranks_are_one_output(bare: Notebook) -> None:
    bare.up(10)
    cell = bare.ok("%%remote\nfrom IPython.display import HTML\nHTML(f'<b>{rank}</b>')", 60)
    (shown,) = outputs(cell)
    assert shown["text/html"].count("<details open>") == 10
    assert "show all: <b>[4-9]</b>" in shown["text/html"]
    assert "more that differ" not in shown["text/html"] + shown["text/plain"]
