"""The kernel: ipykernel's with our magics built in. It ends its ranks when it ends."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

from monarch_kernel.notebook.kernel.comms import LiveComms
from monarch_kernel.notebook.kernel.interrupts import KernelInterrupts
from monarch_kernel.notebook.magics.magics import load

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
        self._interrupts = KernelInterrupts(self._call_later)
        self._interrupts.guard(self.shell)
        self._magics.meshes.interrupt_others = self._interrupts.interrupt_subshells

    @property
    def banner(self) -> str:  # type: ignore[override]
        """The banner that consoles show."""
        theirs = getattr(self.shell, "banner", "")
        return f"monarch_kernel {self.implementation_version} | %mesh up NAME -n 4 brings up ranks, %mesh? shows help\n{theirs}"

    def start(self) -> None:
        """Start serving; meanwhile, the process from which ranks are forked loads torch."""
        super().start()  # type: ignore[no-untyped-call]
        self._interrupts.watch(self._control_loop)
        self._interrupts.install()  # ipykernel ignores SIGINT between cells; a subshell may be running one
        self._magics.meshes.prepare()

    async def dispatch_shell(self, *args: Any, **kwargs: Any) -> None:
        """Handle a request; widget messages that arrive while a cell awaits belong to the request of that cell."""
        with nullcontext() if kwargs.get("concurrent") else self._interrupts.request():
            await super().dispatch_shell(*args, **kwargs)

    def _call_later(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call a function on the thread of the control channel."""
        self._control_loop.call_soon_threadsafe(self._control_loop.call_later, delay_s, function)

    @property
    def _control_loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = self.control_thread.io_loop.asyncio_loop
        return loop

    def pre_handler_hook(self) -> None:
        """Install our handler of SIGINT before a request is handled."""
        self._interrupts.install()

    def post_handler_hook(self) -> None:
        """Install our handler of SIGINT again after a request, which may have replaced it."""
        self._interrupts.install()

    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Any:
        """Handle SIGINT while a cell of the main shell awaits; ipykernel's version does not wake the event loop."""
        return self._interrupts.awaited(future)

    def _dummy_context_manager(self, *args: Any) -> Any:
        """Handle interrupts while a cell of a subshell awaits, which ipykernel does not do."""
        return self._interrupts.awaited(args[0])

    async def shutdown_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Shut down. First stop reading the control channel, as pages that show meshes continue to send messages there."""
        control = self.control_stream
        if control is not None and stream is control:
            control.stop_on_recv()
        await super().shutdown_request(stream, ident, parent)  # type: ignore[no-untyped-call]

    async def do_shutdown(self, restart: bool) -> Any:
        """End the ranks, then the kernel."""
        self._magics.meshes.close()
        reply = super().do_shutdown(restart)  # type: ignore[no-untyped-call]
        return await reply if inspect.isawaitable(reply) else reply
