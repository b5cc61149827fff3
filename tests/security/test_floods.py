"""A rank that sends more than the controller reads waits, and fills neither its own memory nor that of the controller."""

from __future__ import annotations

from pathlib import Path

from monarch_kernel.actor import ProcMesh
from monarch_kernel.runtime.controller.effects import RichEvent
from monarch_kernel.runtime.controller.session import current_session
from tests.support.waiting import LONG_S, wait_until

FLOOD = """
import gc, pathlib
from IPython.display import publish_display_data
from monarch_kernel.runtime.worker.displays import MOST_NBYTES, Displays

(displays,) = [each for each in gc.get_objects() if type(each) is Displays]
folder, unsent, most = pathlib.Path(FOLDER), displays._unsent, 0
def look():
    global most
    most = max(most, nbytes := unsent())
    if nbytes > MOST_NBYTES: (folder / "waits").touch()
    return nbytes
displays._unsent = look
for i in range(100): publish_display_data({"text/html": chr(97 + i % 26) * 1_000_000})
displays._unsent = unsent
(folder / "done").touch()
most
"""


def test_a_rank_waits_while_the_controller_does_not_read(procs: ProcMesh, tmp_path: Path) -> None:
    seen = []

    def see(event: object) -> None:
        if isinstance(event, RichEvent):
            if not seen:  # read nothing until the rank waits, or has not waited
                wait_until(lambda: any(tmp_path.iterdir()), "the rank to wait")
            seen.append(len(str(event.data["text/html"])))

    stop = current_session().runtime.watch(see)
    try:
        (most,) = procs[[0]].run(FLOOD.replace("FOLDER", repr(str(tmp_path)))).get(LONG_S).values()
    finally:
        stop()
    assert {path.name for path in tmp_path.iterdir()} == {"waits", "done"}
    assert most < 40_000_000
    assert seen == [1_000_000] * 100
