"""``%mesh debug t[1] --dap``: the ports at which editors find ranks to debug."""

from __future__ import annotations

import json

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import MonarchError, format_ranks
from monarch_kernel.features.debugging.dap_controller import DapPort
from monarch_kernel.notebook.syntax.lines import UsageProblem

__all__ = ["EditorPorts"]


class EditorPorts:
    """The ports of one notebook, by process."""

    def __init__(self) -> None:
        self._ports: dict[int, DapPort] = {}

    def open(self, mesh: ProcMesh) -> str:
        """Open a port for a rank, or find its open one, and describe how an editor connects.

        Args:
            mesh: a slice of one rank.

        Raises:
            UsageProblem: it is no single rank, or the rank is dead or can't be debugged.
        """
        if len(mesh.ranks) != 1:
            raise UsageProblem(
                f"%mesh debug --dap: an editor debugs one rank, not {mesh.name}{format_ranks(mesh.ranks)}; write "
                f"%mesh debug {mesh.name}[{mesh.ranks[0]}] --dap"
            )
        name, proc = f"{mesh.name}{format_ranks(mesh.ranks)}", mesh.procs[0]
        if mesh.ranks[0] in mesh.whole.deaths():
            raise UsageProblem(
                f"%mesh debug --dap: {name} is dead; %mesh heal {mesh.name} puts a new process in its place"
            )
        if proc in self._ports and self._ports[proc].is_over:  # of a session that was shut down
            self._ports.pop(proc).close()
        if proc not in self._ports:
            try:
                self._ports[proc] = DapPort(mesh.runtime, proc)
            except (MonarchError, OSError, RuntimeError) as error:
                raise UsageProblem(f"%mesh debug --dap: {name}: {error}") from None
        port = self._ports[proc].port
        settings = {
            "name": name,
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": port},
            "justMyCode": False,
        }
        return (
            f"{name} can be debugged at 127.0.0.1:{port}, by one program of this user at a time, until the mesh ends\n"
            f"VS Code, in .vscode/launch.json: {json.dumps(settings)}"
        )

    def close(self, mesh: ProcMesh | None = None) -> None:
        """Close the ports of a mesh, or all."""
        for proc in [proc for proc in self._ports if mesh is None or proc in mesh.procs]:
            self._ports.pop(proc).close()
