"""A connection to a running kernel, which gets the frames that panels get, and sends commands."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty
from types import TracebackType
from typing import Any

from monarch_kernel.notebook.clients.kernels import CHOOSE_KERNEL, ClientError, KernelFile, find_kernels, no_kernel
from monarch_kernel.notebook.view.frames import TARGET, VERSION, unpack_states

__all__ = ["Connection", "OtherKernel", "connect", "connect_all"]

_ANSWER_S = 10.0
"""How long a kernel may take to answer; one whose main thread is busy answers at once, as other threads do it."""

_ASK_EVERY_S = 0.5
_CLOSE_S = 0.5
_CURVES_S = 3.0
_LOOK_EVERY_S = 2.0
_MAX_AT_ONCE = 16
_OURS = "monarch_kernel"


class OtherKernel(ClientError):
    """A kernel is not ours, so it has no meshes."""


class Connection:
    """A connection to a kernel; a context manager. Its methods are for one thread.

    Args:
        file: the connection file of the kernel.
        answer_s: how long the kernel may take to answer.

    Attributes:
        about: what the kernel says about itself: ``implementation``, ``implementation_version`` ...

    Raises:
        ClientError: the kernel does not answer, or is another kernel.
    """

    def __init__(self, file: KernelFile, answer_s: float = _ANSWER_S) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient

        self.file = file
        self.about: dict[str, Any] = {}
        self._answer_s = answer_s
        self._comm = uuid.uuid4().hex
        self._ids = itertools.count(1)
        self._is_open = False
        self._is_new = False
        self._frame: dict[str, Any] = {}
        self._curves: dict[str, dict[str, Any]] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._client: Any = BlockingKernelClient(connection_file=str(file.path))
        self._client.load_connection_file()
        self._client.start_channels(shell=False, iopub=True, stdin=False, hb=False, control=True)
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._is_open:
            self._is_open = False
            self._send("comm_close", {"comm_id": self._comm, "data": {}})
            last = self._send("kernel_info_request", {})  # its reply says that both have arrived
            deadline = time.monotonic() + _CLOSE_S
            while (left := deadline - time.monotonic()) > 0:
                message = _receive(self._client.control_channel, left)
                if message is not None and message["parent_header"].get("msg_id") == last:
                    break
        self._client.stop_channels()

    def meshes(self) -> list[dict[str, Any]]:
        """Return the frames of the meshes, as JSON objects; that of a large mesh has its ``states`` as a list of words."""
        if self._is_open:
            self._is_new = False
            self._say({"kind": "hello"})
            self._wait(lambda: self._is_new and self._frame, "the state of the meshes", self._answer_s)
        self._open()
        return [_readable(mesh) for mesh in self._frame.get("meshes", ())]

    def mesh(self, name: str) -> dict[str, Any]:
        """Return the frame of a mesh, with the ``curves`` of its loops.

        Raises:
            ClientError: there is no such mesh.
        """
        meshes = self.meshes()
        found = next((mesh for mesh in meshes if mesh["name"] == name), None)
        if found is None:
            raise ClientError(_no_mesh(name, {self: [mesh["name"] for mesh in meshes]}))
        if found.get("loops"):
            with suppress(ClientError):  # the loop may be gone by now
                self._wait(lambda: name in self._curves, f"the curves of {name}", _CURVES_S)
            curves = self._curves.get(name, {})
            found["curves"] = {key: curves[key] for key in ("loops", "earlier") if key in curves}
        return found

    def ask(self, command: str, mesh: str = "", *, takes_s: float = 60.0, **arguments: Any) -> str:
        """Send a command, and return the text that the magic of this name would print.

        Args:
            command: see `notebook.view.frames`.
            mesh: name of the mesh.
            takes_s: how long the command may take.
            arguments: the arguments of the command.

        Raises:
            ClientError: the command failed; the text is the reason.
        """
        for name, value in arguments.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
                raise ClientError(f"{command} {mesh}: {name} must be a finite number, not {value}")
        self._open()
        id = next(self._ids)
        self._say({"kind": "command", "id": id, "command": command, "mesh": mesh, **arguments})
        self._wait(lambda: id in self._replies, f"{command} of {mesh or 'the kernel'}", takes_s + self._answer_s)
        reply = self._replies.pop(id)
        if not reply["ok"]:
            raise ClientError(reply["text"])
        return str(reply["text"])

    def loop(self, mesh: str, command: str, **arguments: Any) -> str:
        """Control the last loop of a mesh that runs: ``pause``, ``resume``, ``step``, ``stop`` or ``set``.

        Raises:
            ClientError: there is no such loop, or it refuses the command.
        """
        going = [loop for loop in self.mesh(mesh).get("loops", ()) if loop["state"] != "over"]
        if not going:
            raise ClientError(f"{mesh} runs no live loop (for step in live.loop(...))")
        return self.ask(command, mesh, loop=[going[-1]["request"], going[-1]["number"]], **arguments)

    # -- messages

    def _greet(self) -> None:
        """Wait until the kernel has answered, and its broadcasts arrive, too."""
        asked: list[str] = []
        received: set[str] = set()
        deadline = time.monotonic() + self._answer_s
        while not (self.about and received):
            if time.monotonic() > deadline:
                raise ClientError(
                    f"the kernel {self.file.path} does not answer: it has hung in native code, or it is stopped; interrupt or "
                    "restart it in Jupyter"
                )
            asked.append(self._send("kernel_info_request", {}))
            ask_again = time.monotonic() + _ASK_EVERY_S
            while not (self.about and received) and (left := ask_again - time.monotonic()) > 0:
                if (message := _receive(self._client.iopub_channel, min(left, 0.05))) is not None:
                    received.update({message["parent_header"].get("msg_id", "")} & {*asked})
                if (message := _receive(self._client.control_channel, 0)) is not None:
                    self.about = message["content"] if message["msg_type"] == "kernel_info_reply" else self.about
        if self.about.get("implementation") != _OURS:
            raise OtherKernel(
                f"{self.file.path} is a kernel of {self.about.get('implementation')}, which has no meshes"
            )

    def _open(self) -> None:
        """Open the comm, and wait for the first frame."""
        if self._is_open:
            return
        self._is_open = True
        self._send("comm_open", {"comm_id": self._comm, "target_name": TARGET, "data": {}})
        self._wait(lambda: self._is_new and self._frame, "the state of the meshes", self._answer_s)
        if (version := self._frame.get("version")) != VERSION:
            raise ClientError(
                f"the kernel {self.file.path} speaks version {version} of the protocol, and this program {VERSION}: use the "
                "monarch_kernel of the kernel's environment"
            )

    def _send(self, kind: str, content: Mapping[str, Any]) -> str:
        message = self._client.session.msg(kind, content)
        self._client.control_channel.send(message)
        return str(message["header"]["msg_id"])

    def _say(self, data: Mapping[str, Any]) -> None:
        self._send("comm_msg", {"comm_id": self._comm, "data": dict(data)})

    def _wait(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Receive messages until a condition holds."""
        deadline = time.monotonic() + timeout_s
        look_at = time.monotonic() + _LOOK_EVERY_S
        while not condition():
            now = time.monotonic()
            if now > deadline:
                raise ClientError(f"the kernel {self.file.path} has not sent {what} within {timeout_s:.0f} s")
            if now > look_at:
                look_at = now + _LOOK_EVERY_S
                if not self.file.is_listening():
                    raise ClientError(f"the kernel {self.file.path} has ended")
            if (message := _receive(self._client.iopub_channel, 0.2)) is not None:
                self._handle(message)

    def _handle(self, message: Mapping[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] not in ("comm_msg", "comm_close") or content.get("comm_id") != self._comm:
            return
        if message["msg_type"] == "comm_close":
            self._is_open = False
            raise ClientError(
                f"the kernel {self.file.path} has closed the connection: its magics are older, or it ends"
            )
        data = content["data"]
        if data["kind"] == "history":  # the answer to hello; the next frame is that of now
            self._is_new, self._frame = True, {}
            self._curves.clear()
        elif data["kind"] == "frame":
            self._frame = data
        elif data["kind"] == "curves":
            self._curves[data["mesh"]] = data
        elif data["kind"] == "reply":
            self._replies[data["id"]] = data


def _receive(channel: Any, timeout_s: float) -> dict[str, Any] | None:
    """Return the next message of a channel that is signed with the key of the kernel; None if there is none in time."""
    try:
        message: dict[str, Any] = channel.get_msg(timeout=timeout_s)
    except (Empty, ValueError):  # another process may listen at the port of a kernel that has ended
        return None
    return message


def _readable(mesh: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(mesh)
    if packed := found.get("states"):
        found["states"] = unpack_states(packed, sum(found["counts"].values()))
    return found


def connect(kernel: str = "", mesh: str = "", answer_s: float = _ANSWER_S) -> Connection:
    """Connect to the one kernel that a user means.

    Args:
        kernel: its connection file, id or notebook; empty if only one is possible.
        mesh: a mesh that it must have; empty for any.
        answer_s: how long each kernel may take to answer. One that does not answer prevents no command to another.

    Raises:
        ClientError: there is no such kernel, or there are several; the text has the kernels that could not be reached, and why.
    """
    connections, problems = connect_all(kernel, answer_s)
    names: dict[Connection, list[str]] = {}
    chosen: Connection | None = None
    try:
        for each in connections:
            try:
                names[each] = [one["name"] for one in each.meshes()] if mesh else []
            except ClientError as error:  # it has no say in which kernel is meant
                problems.append(str(error))
        chosen = _choose(names, mesh, problems)
        return chosen
    finally:
        for each in connections:
            if each is not chosen:
                each.close()


def _choose(names: Mapping[Connection, Sequence[str]], mesh: str, problems: Sequence[str]) -> Connection:
    """Return the one kernel that has a mesh.

    Args:
        names: the names of the meshes of each kernel that answers.
        mesh: the mesh; empty for any.
        problems: why other kernels can't be reached.

    Raises:
        ClientError: there is no such kernel, or there are several.
    """
    fitting = [each for each, known in names.items() if not mesh or mesh in known]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        what = f"has a mesh {mesh!r}" if mesh else "runs"
        named = ", ".join(each.file.notebook or each.file.id for each in fitting)
        raise ClientError(f"more than one kernel {what} ({named}): {CHOOSE_KERNEL}")
    if names:
        missing = _no_mesh(mesh, names)
    elif problems:
        missing = "no kernel can be used" if len(problems) > 1 else ""
    else:
        missing = no_kernel()
    raise ClientError("; ".join([*([missing] if missing else []), *problems]))


def _no_mesh(name: str, known: Mapping[Connection, Sequence[str]]) -> str:
    kernels = [
        f"{each.file.notebook or each.file.path}; meshes: {', '.join(has) or 'none'}" for each, has in known.items()
    ]
    return f"there is no mesh {name!r} in {', nor in '.join(kernels)}"


def connect_all(kernel: str = "", answer_s: float = _ANSWER_S) -> tuple[list[Connection], list[str]]:
    """Connect to all kernels with meshes that run, or to those of a name.

    Returns:
        The connections, and why some kernels can't be reached.

    Raises:
        ClientError: no kernel has this name.
    """
    files, left_out = find_kernels(kernel)
    with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
        tried = list(pool.map(_try, files, itertools.repeat(answer_s)))
    problems = [each for each in tried if isinstance(each, str) and each]
    return [each for each in tried if isinstance(each, Connection)], problems + left_out


def _try(file: KernelFile, answer_s: float) -> Connection | str:
    """Connect to a kernel; the reason if that is not possible, and an empty text for a kernel of something else."""
    try:
        return Connection(file, answer_s)
    except (OtherKernel, FileNotFoundError):  # one that has just ended removes its file
        return ""
    except ClientError as error:
        return str(error)
