"""Widgets that ranks make are live in the page: it gets their models, and a change in the page calls observers on the rank."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import wait_until

SLIDERS = """%%remote
import ipywidgets
from IPython.display import display
slider = ipywidgets.IntSlider(value=3 + rank)
slider.observe(lambda change: print("changed to", change["new"]), "value")
slider
"""


class Models:
    """The models of widgets in a page, from the messages that it receives.

    Attributes:
        states: id of a model -> its state.
        closed: ids of models that were closed.
        controls: messages on the control comm.
    """

    def __init__(self, notebook: Notebook) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self.closed: list[str] = []
        self.controls: list[dict[str, Any]] = []
        self._control = uuid.uuid4().hex
        self._notebook = notebook
        notebook.on_message = self._handle

    def _handle(self, message: dict[str, Any]) -> None:
        content = message["content"]
        id = content.get("comm_id", "")
        if message["msg_type"] == "comm_open":
            self.states[id] = dict(content["data"]["state"])
        elif message["msg_type"] == "comm_close":
            self.closed.append(id)
        elif message["msg_type"] == "comm_msg" and id == self._control:
            self.controls.append(content["data"])
        elif message["msg_type"] == "comm_msg":
            self.states.setdefault(id, {}).update(content["data"].get("state", {}))

    def change(self, id: str, **state: Any) -> None:
        """Change a model in the page."""
        self.states[id].update(state)
        self._send("comm_msg", id, data={"method": "update", "state": state, "buffer_paths": []})

    def press(self, id: str) -> None:
        """Press a button."""
        self._send("comm_msg", id, data={"method": "custom", "content": {"event": "click"}})

    def reload(self) -> dict[str, Any]:
        """Ask for all states, as a page does that is opened again."""
        n = len(self.controls)
        self._send("comm_open", self._control, target_name="jupyter.widget.control", data={}, version="1.0.0")
        self._send("comm_msg", self._control, data={"method": "request_states"})
        wait_until(self.pump(lambda: len(self.controls) > n), "the states")
        return dict(self.controls[-1]["states"])

    def pump(self, condition: Any) -> Any:
        """Make a condition receive messages before it is checked."""

        def check() -> Any:
            self._notebook.pump(0.02)
            return condition()

        return check

    def _send(self, kind: str, id: str, version: str = "", **content: Any) -> None:
        client = self._notebook.client
        message = client.session.msg(kind, {"comm_id": id, **content})
        message["metadata"] = {"version": version}
        client.shell_channel.send(message)


@pytest.fixture
def models(notebook: Notebook) -> Models:
    return Models(notebook)


def test_sliders_of_ranks_move_in_the_page_and_call_their_observers(notebook: Notebook, models: Models) -> None:
    cell = notebook.ok(SLIDERS)
    first, second = cell.widgets
    assert cell.stderr == ""
    assert "[0]" in cell.plain
    assert [models.states[id]["value"] for id in (first, second)] == [3, 4]
    assert models.states[first]["_view_name"] == "IntSliderView"
    models.change(second, value=9)
    cell.wait_for(lambda cell: "[1] changed to 9" in cell.stdout)
    assert notebook.ok("%%remote\nslider.value").plain.split() == ["[0]", "3", "[1]", "9"]
    notebook.ok("%%remote\nslider.value = 5")
    wait_until(models.pump(lambda: [models.states[id]["value"] for id in (first, second)] == [5, 5]), "the new values")


def test_a_reloaded_page_finds_the_models_of_ranks_as_they_are_now(notebook: Notebook, models: Models) -> None:
    ids = notebook.ok(SLIDERS).widgets
    notebook.ok("%%remote\nslider.value = 40 + rank")
    wait_until(models.pump(lambda: [models.states[id]["value"] for id in ids] == [40, 41]), "the new values")
    states = models.reload()
    assert [states[id]["state"]["value"] for id in ids] == [40, 41]
    assert states[ids[0]]["model_name"] == "IntSliderModel"
    notebook.ok("%%remote t[0]\nslider.close()")
    wait_until(models.pump(lambda: models.closed), "the end of the model")
    assert models.closed == [ids[0]]
    assert ids[0] not in models.reload()
    notebook.ok("import ipywidgets; ipywidgets.Widget.close_all()")
    wait_until(models.pump(lambda: ids[1] in models.closed), "the end of all models")
    known = "import comm\nslider.comm.comm_id in comm.get_comm_manager().comms"
    assert notebook.ok(f"%%remote t[1]\n{known}").plain.endswith("False")


def test_quick_changes_arrive_merged(notebook: Notebook, models: Models) -> None:
    received: list[dict[str, Any]] = []
    handle = notebook.on_message
    notebook.on_message = lambda message: (received.append(message), handle(message))
    counts = "bar = ipywidgets.IntProgress(max=20_000)\ndisplay(bar)\nfor i in range(20_001): bar.value = i"
    cell = notebook.ok(f"%%remote t[0]\n{counts}")
    (id,) = cell.widgets
    wait_until(models.pump(lambda: models.states[id]["value"] == 20_000), "the last value")
    assert len([each for each in received if each["content"].get("comm_id") == id]) < 2_000


def test_buttons_interact_and_output_widgets_work(notebook: Notebook, models: Models) -> None:
    cell = notebook.ok(
        """%%remote t[1]
button = ipywidgets.Button(description="go")
output = ipywidgets.Output()

@button.on_click
def pressed(_):
    with output:
        print("pressed on", rank)
        display(rank)

display(button, output)
"""
    )
    button, output = cell.widgets
    models.press(button)
    wait_until(models.pump(lambda: len(models.states[output].get("outputs", ())) == 2), "the output")
    stream, shown = models.states[output]["outputs"]
    assert (stream["text"], shown["data"]) == ("pressed on 1\n", {"text/plain": "1"})
    assert cell.stdout == ""

    notebook.ok("%%remote t[0]\n@ipywidgets.interact(x=(0, 5))\ndef twice(x=1):\n    return x * 2")
    (slider,) = [id for id, state in models.states.items() if state.get("description") == "x"]
    answers = lambda: [  # noqa: E731
        each["data"]["text/plain"]
        for state in models.states.values()
        for each in state.get("outputs", ())
        if each["output_type"] == "display_data"
    ]
    wait_until(models.pump(lambda: "2" in answers()), "the first answer")
    models.change(slider, value=4)
    wait_until(models.pump(lambda: "8" in answers()), "the next answer")


def test_an_error_of_an_observer_is_shown_and_harms_nothing(notebook: Notebook, models: Models) -> None:
    cell = notebook.ok(
        """%%remote t[0]
box = ipywidgets.Checkbox(value=False)
box.observe(lambda change: 1 / 0, "value")
display(box)
"""
    )
    (id,) = cell.widgets
    models.change(id, value=True)
    cell.wait_for(lambda cell: "ZeroDivisionError" in cell.stderr)
    assert notebook.ok("%%remote t[0]\nbox.value").plain.endswith("True")


STUCK = """%%remote t[0]
import time
stuck = ipywidgets.Button(description="stuck")
stuck.on_click(lambda button: print("begins", flush=True) or time.sleep(1000))
leaves = ipywidgets.Button(description="leaves")
leaves.on_click(lambda button: exit(3))
display(stuck, leaves)
"""


def test_a_callback_is_shown_and_can_be_interrupted(notebook: Notebook, models: Models) -> None:
    cell = notebook.ok(STUCK)
    models.press(cell.widgets[0])
    cell.wait_for(lambda cell: "begins" in cell.stdout)
    assert "a widget's callback" in notebook.ok("%mesh show t").shown[-1]["text/plain"]
    assert "t: interrupted a widget's callback" in notebook.ok("%mesh interrupt t[0]").stdout
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"
    assert "KeyboardInterrupt" in cell.stderr


def test_a_callback_can_not_end_its_rank(notebook: Notebook, models: Models) -> None:
    cell = notebook.ok(STUCK)
    models.press(cell.widgets[1])
    cell.wait_for(lambda cell: "SystemExit: 3 (a callback cannot end its rank; use %mesh down)" in cell.stderr)
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


def test_bars_of_tqdm_notebook_are_merged(notebook: Notebook, models: Models) -> None:
    before = set(models.states)
    cell = notebook.ok("%%remote\nfrom tqdm.notebook import tqdm, trange\nfor _ in tqdm(range(7), desc='steps'): pass")
    assert not cell.widgets
    assert set(models.states) == before
    assert "7/7" in cell.text + str([m["content"] for m in cell.of_type("display_data", "update_display_data")])


def test_controls_of_ranks_that_have_ended_are_disabled(notebook: Notebook, models: Models) -> None:
    (first, *_) = notebook.ok(SLIDERS).widgets
    notebook.up(1, "other")
    (second,) = notebook.ok(SLIDERS.replace("%%remote", "%%remote other")).widgets
    notebook.ok("%mesh down other")
    wait_until(models.pump(lambda: models.states[second]["disabled"]), "the disabled slider")
    assert not models.states[first]["disabled"]
    assert second not in models.closed
    assert second not in models.reload()
    models.change(second, value=1)  # nothing answers
    models.change(first, value=8)
    assert notebook.ok("%%remote t[0]\nslider.value").plain.endswith("8")
