"""The text and displays of ranks, as they reach the notebook."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernel.conftest import ranks_of

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

MAX_MESSAGES_PER_S = 1_000  # jupyter_server drops messages above these rates, over windows of 3 s
MAX_NBYTES_PER_S = 1_000_000
WINDOW_S = 3.0


def both(*lines: str) -> dict[int, list[str]]:
    """The lines of two ranks with the same output."""
    return {0: list(lines), 1: list(lines)}


def test_pieces_of_a_line_are_joined(notebook: Notebook) -> None:
    cell = notebook.ok(
        "%%remote\nimport time\nprint('a', rank, end='')\ntime.sleep(0.2)\nprint(' b')\nprint('c', end='')"
    )
    assert cell.lines() == {0: ["a 0 b", "c"], 1: ["a 1 b", "c"]}


def test_lines_come_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    cell = notebook.send(
        "%%remote\nimport os, time\nprint('early', flush=True)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint('late')"
    )
    cell.wait_for(lambda cell: cell.lines() == both("early"))
    assert not cell.reply
    gate.touch()
    assert cell.wait().lines() == both("early", "late")


def test_stderr_is_stderr(notebook: Notebook) -> None:
    cell = notebook.ok("%%remote\nimport sys\nprint('oh', file=sys.stderr)\nprint('ah')")
    assert cell.lines("stderr") == both("oh")
    assert cell.lines() == both("ah")


def test_lines_of_both_streams_are_shown_in_the_order_of_their_rank(notebook: Notebook) -> None:
    cell = notebook.ok(
        "%%remote\nimport sys\nfor i in range(50):\n"
        "    print('out', i)\n    if i % 3 == rank: print('err', i, file=sys.stderr)"
    )
    shown: dict[int, list[str]] = {0: [], 1: []}
    for message in cell.of_type("stream"):
        for line in message["content"]["text"].splitlines():
            label, _, text = line.partition(" ")
            for rank in ranks_of(label):
                shown[rank].append(text)
    for rank, lines in shown.items():
        expected = [[f"out {i}", f"err {i}"] if i % 3 == rank else [f"out {i}"] for i in range(50)]
        assert lines == [line for each in expected for line in each]


def test_output_of_descriptors_and_children_is_shown(bare: Notebook) -> None:
    bare.up(2)
    cell = bare.ok(
        "%%remote\nimport os, subprocess\n_ = os.write(1, b'by descriptor\\n')\n_ = os.write(2, b'by the other\\n')\n"
        "_ = subprocess.run(['echo', 'by a child'])"
    )
    assert cell.lines() == both("by descriptor", "by a child")
    assert cell.lines("stderr") == both("by the other")
    for i in range(20):  # later output must not be delayed
        assert bare.ok(f"%%remote\nprint('line', {i})").lines() == both(f"line {i}")


def test_all_output_of_a_cell_is_there_at_its_end(notebook: Notebook) -> None:
    for i in range(20):
        cell = notebook.ok(f"%%remote\nprint('line', {i})")
        assert cell.lines() == both(f"line {i}")


def test_a_progress_bar_is_one_line(notebook: Notebook) -> None:
    cell = notebook.ok("%%remote\nfor i in range(101): print(f'\\r{i}%', end='')\nprint()")
    assert f"{cell.stdout}{cell.plain}".split() == ["[0-1]", "100%"]  # live or not, depending on the machine's load


def test_rich_results_are_shown_with_their_ranks(notebook: Notebook) -> None:
    cell = notebook.ok("%%remote\nfrom IPython.display import HTML\nHTML(f'<b>{rank}</b>')")
    shown = [data.get("text/html") or data["text/plain"] for data in cell.shown]
    assert len(shown) == 1, "one output, with a switcher"
    assert shown[0].index("<b>[0]</b>") < shown[0].index("<b>0</b>") < shown[0].index("<b>[1]</b>")
    cell = notebook.ok("%%remote\nHTML('<i>same</i>')")
    assert [data.get("text/html") or data["text/plain"] for data in cell.shown] == ["[0-1]", "<i>same</i>"]


def test_displays_of_a_cell_come_in_order(notebook: Notebook) -> None:
    cell = notebook.ok(
        "%%remote\nfrom IPython.display import HTML, display\nprint('one')\ndisplay(HTML('two'))\n"
        "print('three')\ndisplay(HTML('four'))\n'five'"
    )
    assert [data.get("text/html") for data in cell.shown if "text/html" in data] == ["two", "four"]
    assert cell.shown[-1]["text/plain"] == "[0-1] 'five'"
    assert cell.lines() == both("one", "three")


def test_output_after_the_cell_does_no_harm(notebook: Notebook) -> None:
    notebook.ok(
        "%%remote\nimport threading, time\nhold = threading.Event()\ndef later():\n    hold.wait(20)\n"
        "    print('from the past', flush=True)\n    from IPython.display import display, HTML\n    display(HTML('late'))\n"
        "thread = threading.Thread(target=later); thread.start()"
    )
    assert notebook.ok("%%remote\nhold.set(); thread.join(); 'on'").plain.endswith("[0-1] 'on'")
    cell = notebook.ok("%%remote\nthreading.Timer(0.05, print, ['while no cell runs']).start()")
    cell.wait_for(lambda cell: cell.lines() == both("while no cell runs"))
    assert notebook.ok("%%remote\nprint('now')").lines()[1][-1] == "now"


def test_the_ranks_have_no_keyboard(notebook: Notebook, bar: Bar) -> None:
    cell = notebook.run("%%remote\ninput('name? ')")
    assert cell.ename == "RemoteError"
    assert "does not work on a rank" in cell.error
    bar.check(cell.elapsed_s, 3, "the cell")


def test_a_flood_is_bounded_in_order_and_counted(four: Notebook) -> None:
    n = 25_000
    cell = four.send(f"%%remote\nfor i in range({n}): print(rank, i)").wait(60)
    assert cell.ok, cell.text[-2000:]
    kept: dict[int, list[int]] = {rank: [] for rank in range(4)}
    left_out: Counter[int] = Counter()
    for line in cell.stdout.splitlines():
        if match := re.fullmatch(r"\[(\d)\] (\d) (\d+)", line):
            assert match[1] == match[2]
            kept[int(match[1])].append(int(match[3]))
        else:
            note = re.fullmatch(
                r"… ([\d,]+) lines? left out here \((.*); shown: the first and the last; more: %mesh logs t --lines \d+000\)",
                line,
            )
            assert note, line
            left_out.update(counts(note[2]))
    for rank, numbers in kept.items():
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == n - 1
        assert len(numbers) + left_out[rank] == n
    assert min(numbers[0] for numbers in kept.values()) == 0
    assert sum(left_out.values()) > 0
    assert_within_limits(cell)


def counts(note: str) -> dict[int, int]:
    """Parse ``rank 0: 1,234`` and ``ranks 1-3: 17 each`` in a note."""
    found = {}
    for ranks, n in re.findall(r"ranks? ([\d,-]+): ([\d,]+\d|\d)", note):
        for span in ranks.split(","):
            first, _, last = span.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                found[rank] = int(n.replace(",", ""))
    return found


def assert_within_limits(cell: Cell) -> None:
    """Check that no window of some seconds has more or larger messages than a Jupyter server lets through."""
    sent = [(message["sent_s"], len(json.dumps(message["content"]))) for message in cell.messages]
    for i, (begin, _) in enumerate(sent):
        window = [nbytes for at, nbytes in sent[i:] if at < begin + WINDOW_S]
        assert len(window) < MAX_MESSAGES_PER_S * WINDOW_S
        assert sum(window) < MAX_NBYTES_PER_S * WINDOW_S


def test_an_endless_flood_is_bounded_and_can_be_interrupted(four: Notebook, bar: Bar) -> None:
    cell = four.send("%%remote\ni = 0\nwhile True:\n    print('x' * 100, rank, i); i += 1")
    until = time.monotonic() + 4
    while time.monotonic() < until:
        four.pump(0.02)
    with bar.below(2.0, "the interrupt"):
        four.interrupt()
        cell.wait()
    assert cell.ename == "RemoteInterrupt"
    assert "left out here" in cell.stdout
    assert_within_limits(cell)
    assert four.ok("%%remote\ni > 1000").plain == "[0-3] True"
