"""Serves the meshes of a running kernel to agents, by the Model Context Protocol (package ``mcp``).

Each call of a tool makes its own connection, so a kernel may be restarted between two calls. Tools that change something exist
only if the user allows changes; an agent can't ask for them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from monarch_kernel.notebook.clients.actions import ALL_RANKS, HEAL_S, LOOP, about, control_loop, ranks_of, whole_mesh
from monarch_kernel.notebook.clients.actions import show_mesh as show_mesh_of
from monarch_kernel.notebook.clients.connection import Connection, connect, connect_all
from monarch_kernel.notebook.clients.kernels import CHOOSE_KERNEL, GIVE_FILE, NAMES_KERNELS, ClientError

__all__ = ["for_agent", "make_server", "serve"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_INSTRUCTIONS = """Training and other programs run on ranks (processes) of meshes, which a Jupyter kernel controls.
list_meshes comes first. show_mesh has what each rank does, how late it is in collectives (the rank with the largest `late` is
the straggler), its errors, the waits, and the loops with their knobs and curves. A mesh is named as `t`, or with ranks as
`t[0,2]`, `t[0:4]`."""


_WORDS = {
    NAMES_KERNELS: "the user has started this server for that kernel; without --kernel, list_meshes names all that run",
    CHOOSE_KERNEL: "list_meshes names their meshes; the user can start this server for one of them, with --kernel",
    GIVE_FILE: "start this server with --kernel and the connection file of a kernel that runs",
    f"{LOOP}: ": "",  # the protocol says which tool has failed
}
"""What errors say to those who use the command line -> what they say to an agent, which has tools."""


def serve(kernel: str = "", *, allow_changes: bool = False) -> None:
    """Serve one agent on standard input and output, until it closes them.

    Args:
        kernel: the kernel: its notebook, id or connection file; empty for the one that has the mesh of a call.
        allow_changes: whether the agent can set knobs, control loops, and interrupt and heal ranks.

    Raises:
        ClientError: the package ``mcp`` is missing or too old.
    """
    make_server(kernel, allow_changes=allow_changes).run("stdio")


def for_agent(text: str) -> str:
    """Name the tools of an agent in the text of an error, in place of the command line."""
    for words, of_tools in _WORDS.items():
        text = text.replace(words, of_tools)
    return text


def make_server(kernel: str = "", *, allow_changes: bool = False) -> Any:
    """Make the server; see `serve`."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp_types import ToolAnnotations
    except ImportError as error:
        raise ClientError(
            f"python -m monarch_kernel mcp needs the package mcp, version 2 or later ({error}): "
            "pip install 'monarch_kernel[mcp]'"
        ) from None

    server = MCPServer(
        "monarch_kernel", instructions=_INSTRUCTIONS, version=version("monarch_kernel"), log_level="WARNING"
    )

    def on(mesh: str, action: Callable[[Connection], T]) -> T:
        try:
            with connect(kernel, mesh.partition("[")[0]) as connection:
                return action(connection)
        except ClientError as error:
            raise ToolError(for_agent(str(error))) from None

    def ask(mesh: str, command: str, *, takes_s: float = 60.0, **arguments: Any) -> str:
        def action(connection: Connection) -> str:
            ranks = ranks_of(connection, mesh)
            return connection.ask(command, mesh.partition("[")[0], takes_s=takes_s, ranks=ranks, **arguments)

        return on(mesh, action)

    reads: Callable[[F], F] = server.tool(annotations=ToolAnnotations(read_only_hint=True))

    @reads
    def list_meshes() -> dict[str, Any]:
        """List the kernels that run on this machine, and their meshes with the number of ranks in each state."""
        try:
            connections, problems = connect_all(kernel)
        except ClientError as error:
            raise ToolError(for_agent(str(error))) from None
        kernels = []
        for connection in connections:
            with connection:
                try:
                    meshes = connection.meshes()
                except ClientError as error:
                    problems.append(for_agent(str(error)))
                    continue
                brief = [{key: mesh[key] for key in ("name", "axes", "where", "counts")} for mesh in meshes]
                kernels.append({**about(connection), "meshes": brief})
        return {"kernels": kernels, "problems": problems}

    @reads
    def show_mesh(mesh: str) -> dict[str, Any]:
        """Show a mesh: what each rank does, its line, its memory, how late it is, its error; waits, loops, knobs and curves."""
        return on(mesh, lambda connection: show_mesh_of(connection, mesh))

    @reads
    def show_stacks(mesh: str) -> str:
        """Show what every rank of a mesh does now: the frames of its threads, and the collectives that it waits in."""
        return ask(mesh, "stacks")

    @reads
    def read_logs(mesh: str, lines: int = 100) -> str:
        """Read the last lines that ranks have written; equal lines of several ranks appear once, with their ranks."""
        return ask(mesh, "logs", count=lines)

    @reads
    def show_traceback(mesh: str) -> str:
        """Show the last failures of ranks, with the source and the values of variables."""
        return ask(mesh, "traceback")

    @reads
    def profile(mesh: str, steps: int = 5, seconds: float = 10.0) -> str:
        """Record some steps of what ranks run, and say where the time goes, and which rank the others wait for."""
        return ask(mesh, "profile", takes_s=60.0 + seconds, count=steps, seconds=seconds)

    @reads
    def show_record(mesh: str = "") -> str:
        """Say what the record of the run holds (code, knobs, metrics, seeds), and whether one is written."""

        def action(connection: Connection) -> str:
            if mesh:
                connection.mesh(whole_mesh(mesh, "a record is of the whole run"))
            return connection.ask("record")

        return on(mesh, action)

    if not allow_changes:
        return server
    changes: Callable[[F], F] = server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True))

    @changes
    def set_knob(mesh: str, name: str, value: float | int | bool | str) -> str:
        """Set a knob of the live loop of a mesh, such as the learning rate; says from which step on it holds."""

        def action(connection: Connection) -> str:
            return connection.loop(whole_mesh(mesh, ALL_RANKS), "set", knob=name, value=value)

        return on(mesh, action)

    @changes
    def control_live_loop(mesh: str, action: str) -> str:
        """Control the live loop of a mesh; the action is `pause`, `resume`, `step`, `step 10` or `stop`."""
        return on(mesh, lambda connection: control_loop(connection, mesh, action.split()))

    @changes
    def interrupt(mesh: str, abort: bool = False) -> str:
        """Interrupt what ranks run, as Ctrl-C does; they keep their state. With abort, abort process groups, too."""
        return ask(mesh, "interrupt", abort=abort)

    @changes
    def heal(mesh: str) -> str:
        """Start new processes in place of dead ranks; the others keep their state."""
        return ask(mesh, "heal", takes_s=HEAL_S)

    return server
