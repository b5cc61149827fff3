"""The viewers of a notebook's meshes: sends them updates and carries out their commands.

A viewer is a widget in a cell, or a panel, in a browser. It receives changes at most five times a second, and only while it
says that it is visible (`notebook.view.frames` has the protocol). Each command of a viewer runs on a separate thread, as the
main thread may run a cell.

Theory of operation
===================

`Background` calls `Viewers.publish` five times a second on the thread ``monarch-view``. If no page is visible, that is all.
Otherwise each viewer gets a frame if it differs from its last one (``comm.send``, from any thread). The line in the user's
code that ranks run is asked for once a second (`GetStacks`), and never waited for.

Messages of pages come on the shell or the control channel. `notebook.kernel.comms` takes them on the thread that receives
the channel's messages first, because the main thread may run a cell for hours. A command runs on a separate thread and
calls the method of the magic of the same name; the text that the magic would print is the reply.

A page that is closed says nothing, so a viewer that is silent for 15 s does not look. The table below the widget is what a
saved notebook shows, and is updated now and then.
"""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import LoopView, MeshView
from monarch_kernel.errors import Failure, MeshDownError, MonarchError
from monarch_kernel.notebook.cells.cell_names import in_notebook
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.magics.run_list import RunList
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.view.frames import (
    CARDS,
    COMMANDS,
    EARLIER,
    GONE_S,
    LOOP_COMMANDS,
    PROFILE,
    RECORD,
    TARGET,
    MeshFrame,
    ViewState,
    curves_message,
    mesh_frame,
    to_json,
)
from monarch_kernel.notebook.view.trajectories import trajectories_message
from monarch_kernel.runtime.diagnostics.source_names import describe_line
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["TARGET", "Command", "LiveWidget", "Viewer", "ViewerCommand", "Viewers"]

_EVERY_S = 0.18
"""Minimum time between updates of viewers; a little less than the interval at which the background thread publishes."""

_CURVES_EVERY_S = 1.0
_DOING_EVERY_S = 1.0
_DOING_AFTER_S = 0.5
"""Ranks are asked what they do only when a rank has run for longer than this."""

_SHOWN = 100
"""Number of characters of an invalid value that an error shows."""

_MAX_PANELS = 32
"""Panels that a kernel keeps. Pages may close without a message, so the most recently active are kept; others reconnect."""

_log = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], None]


class ViewerCommand(NamedTuple):
    """A command of a viewer.

    Attributes:
        command: one of `COMMANDS` or `LOOP_COMMANDS`, `PROFILE` or `RECORD`.
        mesh: name of the mesh; empty for `RECORD`.
        ranks: which of its ranks; None for all.
        abort: with ``interrupt``, whether to abort process groups.
        loop: request and number of the loop to control.
        number: with ``step`` and ``profile``, the number of steps; with ``logs``, of lines; None for the default.
        seconds: with ``profile``, the most that it may take.
        knob: with ``set``, the name of the knob.
        value: with ``set``, the new value of the knob.
    """

    command: str
    mesh: str
    ranks: list[int] | None = None
    abort: bool = False
    loop: tuple[int, int] = (0, 0)
    number: int | None = None
    seconds: float = 10.0
    knob: str = ""
    value: int | float | str | bool | None = None


Command = Callable[[ViewerCommand], str]
"""Carries out a command of a viewer and returns a description of the result; raises UsageProblem if it can't be done."""


class Viewer:
    """A widget or panel that shows meshes. Its methods may be called from any thread, and return quickly.

    Args:
        viewers: all viewers of the notebook.
        send: sends a message to this viewer; may be called from any thread.
        mesh: the mesh that it shows; empty for all.
    """

    def __init__(self, viewers: Viewers, send: Send, mesh: str) -> None:
        self.mesh = mesh
        self.looks_until = 0.0
        self._viewers = viewers
        self._send = send
        self._shown: tuple[tuple[MeshFrame, ...], str] | None = None
        self._curves: dict[str, dict[str, Any]] | None = None  # by mesh, as last sent
        self._trajectories: dict[str, dict[str, Any]] = {}  # likewise

    def handle(self, message: object) -> None:
        """Handle a message of the viewer; messages that are not of the protocol are ignored."""
        if not isinstance(message, Mapping):
            return
        kind = message.get("kind")
        if kind in ("hello", "alive"):
            self.looks_until = time.monotonic() + GONE_S
        if kind == "hello":
            self._shown = self._curves = None
            self._trajectories = {}
            self.send({"kind": "history", "meshes": self._viewers.history(self.mesh)})
            self._viewers.publish(force=True)
        elif kind == "away":
            self.looks_until = 0.0
        elif kind == "command":
            self._viewers.carry_out(self, message)
        elif kind in ("runs", "compare"):
            self._viewers.tell_of_runs(self, message)

    def show(self, frame: ViewState) -> None:
        """Send a frame if it differs from the last one, or if bytes flow, as the viewer draws their rate."""
        meshes = tuple(mesh for mesh in frame.meshes if self.mesh in ("", mesh.name))
        shown = meshes, "" if self.mesh else frame.coming
        if shown != self._shown or any(mesh.in_rate or mesh.out_rate for mesh in meshes):
            self._shown = shown
            self.send({"kind": "frame", **to_json(ViewState(frame.at, meshes, frame.seq, coming=shown[1]))})

    def show_curves(self, messages: Mapping[str, dict[str, Any]]) -> None:
        """Send the curves of loops, by mesh, that differ from those sent last; those of earlier loops seldom do."""
        sent = self._curves or {}
        self._curves = {mesh: message for mesh, message in messages.items() if self.mesh in ("", mesh)}
        for mesh, message in self._curves.items():
            before = sent.get(mesh, {})
            if before != message:
                same = {"earlier"} if before.get("earlier") == message["earlier"] else ()
                self.send({key: value for key, value in message.items() if key not in same})

    def show_trajectories(self, messages: Mapping[str, dict[str, Any]]) -> None:
        """Send the samples of meshes that differ from those sent last."""
        sent = self._trajectories
        self._trajectories = {mesh: message for mesh, message in messages.items() if self.mesh in ("", mesh)}
        for mesh, message in self._trajectories.items():
            if sent.get(mesh) != message:
                self.send(message)

    @property
    def is_new(self) -> bool:
        """Whether no curves have been sent to it yet."""
        return self._curves is None

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the viewer."""
        try:
            self._send(message)
        except Exception:  # its connection is gone
            self.looks_until = 0.0
            _log.debug("a message to a viewer can't be sent", exc_info=True)


class Viewers:
    """All viewers of a notebook.

    Args:
        meshes: returns the meshes that are up.
        command: carries out a command of a viewer.

    Attributes:
        by_comm: id of a comm -> the viewer at its other end.
    """

    def __init__(self, meshes: Callable[[], Iterable[ProcMesh]], command: Command) -> None:
        self._meshes = meshes
        self._command = command
        self.by_comm: dict[str, Viewer] = {}
        self._panels: dict[str, Any] = {}
        self._viewers: list[Viewer] = []
        self._last: dict[str, MeshFrame] = {}
        self._doing: dict[str, _DoingNow] = {}
        self._trajectories: dict[str, dict[str, Any]] = {}  # of the last frame, by mesh
        self._seq = 0
        self._coming = ""
        self._sent_at = self._curves_at = 0.0
        self._lock = threading.Lock()
        self._runs = RunList()

    def connect(self, send: Send, mesh: str = "") -> Viewer:
        """Add a new viewer; it receives updates once it has said that it is visible."""
        viewer = Viewer(self, send, mesh)
        with self._lock:
            self._viewers.append(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer."""
        with self._lock:
            if viewer in self._viewers:
                self._viewers.remove(viewer)

    def widget(self, mesh: str, text: str = "") -> LiveWidget | None:
        """Show a live widget of a mesh in the output of the running cell; None if it can't be drawn.

        Without a frontend for widgets, or with an installation of them that does not work, the table is all that is shown.

        Args:
            mesh: name of the mesh.
            text: what a terminal shows in its place.
        """
        kernel = getattr(get_ipython(), "kernel", None)
        if getattr(kernel, "comm_manager", None) is None:
            return None
        try:
            import monarch_kernel.notebook.view.widget  # noqa: F401 - takes a quarter of a second
        except Exception:
            _log.warning("there is no live view: its widget can't be imported", exc_info=True)
            return None
        return LiveWidget(self, mesh, text)

    def panel(self, comm: Any, opened: Mapping[str, Any]) -> None:
        """Handle a comm that a panel opens, perhaps again: a page that has received no answer repeats it."""
        former = self.by_comm.get(comm.comm_id)
        if former is not None:
            self.leave(former)
        if (first := self._panels.get(comm.comm_id)) is not None:
            first._closed = True  # else its finalizer would close the new comm, which has the same id, in the page
        self._panels[comm.comm_id] = comm
        viewer = self.by_comm[comm.comm_id] = self.connect(comm.send)
        comm.on_msg(lambda message: viewer.handle(message["content"]["data"]))
        comm.on_close(lambda message: self.left(comm.comm_id))
        viewer.handle({"kind": "hello"})
        silent = sorted(self._panels, key=lambda id: getattr(self.by_comm.get(id), "looks_until", 0.0))
        for id in silent[: max(0, len(silent) - _MAX_PANELS)]:
            self.left(id)

    def left(self, comm_id: str) -> None:
        """Handle a comm that its other end has closed."""
        self._panels.pop(comm_id, None)
        viewer = self.by_comm.pop(comm_id, None)
        if viewer is not None:
            self.leave(viewer)

    def are_looking(self, mesh: str = "") -> bool:
        """Whether a viewer is visible, of a mesh or of any."""
        now = time.monotonic()
        return any(each.looks_until > now for each in list(self._viewers) if not mesh or each.mesh in ("", mesh))

    def publish(self, *, force: bool = False) -> None:
        """Send changes to visible viewers if the last update is long enough ago; costs nothing if none is visible."""
        now = time.monotonic()
        if not force and now < self._sent_at + _EVERY_S:
            return
        looking = [viewer for viewer in list(self._viewers) if viewer.looks_until > now]
        if not looking:
            return
        with self._lock:
            self._sent_at = now
            frame = self._frame()
            for viewer in looking:
                viewer.show(frame)
            if now >= self._curves_at + _CURVES_EVERY_S or any(viewer.is_new for viewer in looking):
                self._curves_at = now
                curves = self._curves(frame)
                for viewer in looking:
                    viewer.show_curves(curves)
                    viewer.show_trajectories(self._trajectories)

    def show_coming(self, text: str) -> None:
        """Show in panels what a mesh that comes up waits for; an empty text when none does any more."""
        self._coming = text
        self.publish(force=True)

    def history(self, mesh: str = "") -> dict[str, list[tuple[int, int]]]:
        """Return how many bytes went to and from the ranks of meshes in each of the last seconds."""
        return {
            each.name: [(round(took), round(sent)) for took, sent in each.throughput()]
            for each in self._meshes()
            if mesh in ("", each.name)
        }

    def _frame(self) -> ViewState:
        at = time.time()
        meshes = list(self._meshes())
        found = []
        self._trajectories = {}
        for mesh in meshes:
            view = mesh.view()
            if view.trajectories:
                self._trajectories[mesh.name] = trajectories_message(view)
            doing = self._doing.setdefault(mesh.name, _DoingNow())
            is_busy = any(rank.running_s > _DOING_AFTER_S for rank in view.ranks) and len(view.ranks) <= CARDS
            found.append(mesh_frame(view, at, self._last.get(mesh.name), doing.poll(mesh, view) if is_busy else None))
        self._last = {frame.name: frame for frame in found}
        self._doing = {name: doing for name, doing in self._doing.items() if name in self._last}
        self._seq += 1
        return ViewState(at, tuple(found), self._seq, coming=self._coming)

    def _curves(self, frame: ViewState) -> dict[str, dict[str, Any]]:
        """Return the messages with the curves of the loops in a frame, by mesh."""
        found = {}
        for mesh in self._meshes():
            shown = {
                (loop.request, loop.number) for each in frame.meshes if each.name == mesh.name for loop in each.loops
            }
            views = []
            earlier: list[LoopView] = []
            loops = mesh.loops if shown else []
            kept = {loop.key for loop in [loop for loop in loops if loop.key not in shown][-EARLIER:]}
            for loop in loops:
                with suppress(LookupError):  # the loop may be gone by now
                    if loop.key in shown:
                        views.append(loop.view())
                    elif loop.key in kept:
                        earlier.append(loop.view())
            if views:
                found[mesh.name] = curves_message(mesh.name, views, earlier)
        return found

    def tell_of_runs(self, viewer: Viewer, message: Mapping[str, Any]) -> None:
        """Send a viewer the list of recorded runs, or the comparison of two; a thread reads them."""

        def work() -> None:
            try:
                is_list = message.get("kind") == "runs"
                viewer.send(self._runs.message() if is_list else self._runs.comparison(message.get("runs")))
            except (MonarchError, UsageProblem) as error:
                viewer.send({"kind": "compared", "problem": str(error)})
            except Exception as error:  # the page waits for an answer
                _log.exception("runs can't be listed or compared")
                viewer.send({"kind": "compared", "problem": f"{type(error).__name__}: {error}"})

        threading.Thread(target=work, name="monarch-runs", daemon=True).start()

    def carry_out(self, viewer: Viewer, message: Mapping[str, Any]) -> None:
        """Run a command of a viewer on a separate thread, and send the viewer the result."""

        def work() -> None:
            try:
                text, ok = self._ask(message), True
            except (MonarchError, UsageProblem, KeyboardInterrupt) as error:
                text, ok = str(error), False
            except Exception as error:  # the thread must not end without a reply
                _log.exception("a command of a viewer failed: %r", message)
                text, ok = f"{type(error).__name__}: {error}", False
            viewer.send({"kind": "reply", "id": message.get("id", 0), "ok": ok, "text": text})
            self.publish(force=True)

        threading.Thread(target=work, name="monarch-command", daemon=True).start()

    def _ask(self, message: Mapping[str, Any]) -> str:
        command, mesh, ranks = message.get("command"), message.get("mesh"), message.get("ranks")
        if command == RECORD:
            return self._command(ViewerCommand(command, ""))
        if command not in (*COMMANDS, PROFILE, *LOOP_COMMANDS) or not isinstance(mesh, str):
            raise UsageProblem(f"the view has sent an unknown command ({str(command)[:_SHOWN]!r}): reload the page")
        if len(mesh) > _SHOWN:
            raise UsageProblem(f"no mesh has such a name: {mesh[:_SHOWN]!r} ...")
        if command in LOOP_COMMANDS:
            return self._command(_read_loop_command(command, mesh, message))
        if ranks is not None and not (isinstance(ranks, list) and all(type(rank) is int for rank in ranks)):
            raise UsageProblem(f"ranks must be a list of integers, not {str(ranks)[:_SHOWN]!r}")
        seconds = message.get("seconds", 10.0)
        if type(seconds) not in (int, float):
            raise UsageProblem(f"the time of a profile must be a number of seconds, not {str(seconds)[:_SHOWN]!r}")
        return self._command(
            ViewerCommand(
                command, mesh, ranks, bool(message.get("abort")), number=_read_count(message), seconds=float(seconds)
            )
        )


def _read_count(message: Mapping[str, Any]) -> int | None:
    count = message.get("count")
    if count is not None and type(count) is not int:
        raise UsageProblem(f"the number of steps or lines must be an integer, not {str(count)[:_SHOWN]!r}")
    if count is not None and count < 1:
        raise UsageProblem(f"the number of steps or lines must be 1 or more, not {count}")
    return count


def _read_loop_command(command: str, mesh: str, message: Mapping[str, Any]) -> ViewerCommand:
    loop, count = message.get("loop"), _read_count(message)
    knob, value = message.get("knob", ""), message.get("value")
    if not (isinstance(loop, list) and len(loop) == 2 and all(type(each) is int for each in loop)):
        raise UsageProblem(f"a loop must be a list of two integers, not {str(loop)[:_SHOWN]!r}")
    if not isinstance(knob, str) or not isinstance(value, (int, float, str, bool, type(None))):
        raise UsageProblem(
            f"a knob needs a name and a value that is a number, a text, true, false or null, not {str(value)[:_SHOWN]!r}"
        )
    return ViewerCommand(command, mesh, loop=(loop[0], loop[1]), number=count, knob=knob, value=value)


def _note(text: str) -> str:
    """Return the HTML of a line in the place of a widget; an output without data would make nbconvert warn."""
    return f'<div class="mk-static" style="font-size:var(--jp-ui-font-size1, inherit)">{html.escape(text)}</div>'


class LiveWidget:
    """A widget in the output of a cell, with its viewer."""

    def __init__(self, viewers: Viewers, mesh: str, text: str) -> None:
        from monarch_kernel.notebook.view.widget import MeshWidget

        self._viewers = viewers
        self._widget = MeshWidget(mesh=mesh)
        self._viewer = viewers.connect(self._widget.send, mesh)
        self._widget.on_msg(lambda widget, content, buffers: self._viewer.handle(content))
        self._comm_id = self._widget.comm.comm_id
        viewers.by_comm[self._comm_id] = self._viewer
        self._display_id = f"mesh-{self._comm_id}"
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        # A page or file without widgets shows the note. A terminal shows the plain text, and shows the table, too.
        note = f"The live view of {mesh} needs its kernel. The table shows the state when the notebook was saved."
        data = {"application/vnd.jupyter.widget-view+json": view, "text/html": _note(note)}
        if text:
            data["text/plain"] = text
        publish_display_data(data, transient={"display_id": self._display_id})

    def close(self, note: str) -> None:
        """Replace the widget in the page and the notebook by a note; a reopened notebook would report its missing model."""
        self._viewers.left(self._comm_id)
        sink = Sink(get_ipython())
        sink.pin()  # bypass %%capture of the running cell, whose output this is not
        sink.display({"text/html": _note(note), "text/plain": note}, None, self._display_id, update=True)
        self._widget.layout.close()
        self._widget.close()


class _DoingNow:
    """Tracks where the ranks of a mesh are in the user's code; asks them regularly, and never waits for answers."""

    def __init__(self) -> None:
        self._asked: Future[dict[int, Doing | Failure]] | None = None
        self._asked_at = 0.0
        self._asked_in: dict[int, tuple[int, str]] = {}
        self._known: dict[int, tuple[str, str]] = {}
        self._known_in: dict[int, tuple[int, str]] = {}

    def poll(self, mesh: ProcMesh, view: MeshView) -> dict[int, tuple[str, str]]:
        """Return rank -> line and collective, where known; ask the ranks again if it is time.

        A rank that runs something else by now, or has a new process, is no longer at the place that it reported.
        """
        now = time.monotonic()
        activities = {rank.rank: (rank.restarts, rank.activity) for rank in view.ranks}
        asked = self._asked
        if asked is not None and not asked.done() and now > self._asked_at + _DOING_EVERY_S:
            asked.cancel()  # a rank that has not answered holds the GIL, and has not moved on
        if asked is not None and asked.done():  # may lag behind the cancel: another thread may drive the transport
            self._asked = None
            error = asked.exception(0)
            if error is None:
                answers = asked.get(0)
                found = {rank: _place(answer) for rank, answer in answers.items() if isinstance(answer, Doing)}
                self._known |= found
                self._known_in |= {rank: self._asked_in[rank] for rank in found}
            elif not isinstance(error, MeshDownError):
                _log.error("the ranks of %s could not be asked what they do", mesh.name, exc_info=error)
        if self._asked is None and now > self._asked_at + _DOING_EVERY_S:
            self._asked, self._asked_at, self._asked_in = mesh.doing(brief=True), now, activities
        return {rank: place for rank, place in self._known.items() if self._known_in[rank] == activities.get(rank)}


def _place(doing: Doing) -> tuple[str, str]:
    frame = next((activity.user_frame for activity in doing.activities if activity.user_frame is not None), None)
    waits = doing.collectives[0].operation if doing.collectives else ""
    return (describe_line(in_notebook(frame)) if frame is not None else ""), waits
