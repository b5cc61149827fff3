"""The kernel: ipykernel's, with our magics built in, which ends its ranks when it ends."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from typing import Any

from monarch_kernel.kernel.comms import LiveComms
from monarch_kernel.kernel.interrupts import KernelInterrupts
from monarch_kernel.notebook.magics import load

__all__ = ["MonarchKernel"]


class MonarchKernel(LiveComms):
    """An IPython kernel that is the single controller of meshes of ranks."""

    implementation = "monarch_kernel"
    implementation_version = version("monarch_kernel")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert self.shell is not None
        self._magics = load(self.shell)
        self.names = self._magics.names
        self.listen(self._magics.meshes.viewers)
        self._interrupts = KernelInterrupts()
        self._interrupts.guard(self.shell)
        self._magics.meshes.interrupt_others = self._interrupts.strike_subshells

    @property
    def banner(self) -> str:  # type: ignore[override]
        """Shown by consoles."""
        theirs = getattr(self.shell, "banner", "")
        return f"monarch_kernel {self.implementation_version} | %mesh up NAME -n 4 brings up ranks, %mesh? says more\n{theirs}"

    def start(self) -> None:
        """Serve; the process that ranks are forked from loads torch meanwhile."""
        super().start()  # type: ignore[no-untyped-call]
        self._interrupts.install()  # ipykernel ignores SIGINT between cells; a subshell may be running one
        self._magics.meshes.prepare()

    def pre_handler_hook(self) -> None:
        """Before a request is handled: whatever an earlier cell has made of SIGINT, it is ours again."""
        self.saved_sigint_handler = self._interrupts.install()

    async def do_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run a cell."""
        with self._interrupts.cell():
            reply = super().do_execute(*args, **kwargs)  # type: ignore[no-untyped-call]
            return await reply if inspect.isawaitable(reply) else reply

    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Any:
        """While a cell of the main shell awaits: ipykernel's own does not wake the event loop."""
        return self._interrupts.awaited(future)

    def _dummy_context_manager(self, *args: Any) -> Any:
        """While a cell of a subshell awaits, where ipykernel has nothing of the kind."""
        return self._interrupts.awaited(args[0])

    async def shutdown_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """End. Pages that show meshes go on talking by the control channel, which nobody would be there to finish with."""
        control = self.control_stream
        if control is not None and stream is control:
            control.stop_on_recv()
        await super().shutdown_request(stream, ident, parent)  # type: ignore[no-untyped-call]

    async def do_shutdown(self, restart: bool) -> Any:
        """End the ranks, then the kernel."""
        self._magics.meshes.close()
        reply = super().do_shutdown(restart)  # type: ignore[no-untyped-call]
        return await reply if inspect.isawaitable(reply) else reply
