"""The kernel: ipykernel's with our magics built in. It ends its ranks when it ends."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from traitlets import Bool

from monarch_kernel.notebook.kernel.comms import LiveComms
from monarch_kernel.notebook.kernel.interrupts import KernelInterrupts
from monarch_kernel.notebook.magics.magics import load

__all__ = ["MonarchKernel"]


class MonarchKernel(LiveComms):
    """An IPython kernel that is the single controller of meshes of ranks."""

    implementation = "monarch_kernel"
    implementation_version = version("monarch_kernel")
    prepares_ranks = Bool(
        True, help="Whether the process from which ranks are forked starts with the kernel, or with the first mesh."
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert self.shell is not None
        self._magics = load(self.shell)
        self.names = self._magics.names
        self.listen(self._magics.meshes.viewers)
        self._interrupts = KernelInterrupts(self._call_later)
        self._interrupts.guard(self.shell)
        self._magics.meshes.interrupt_others = self._interrupts.interrupt_subshells
        for kind in ("comm_open", "comm_msg", "comm_close"):
            self.shell_handlers[kind] = self._as_user_code(self.shell_handlers[kind])

    @property
    def banner(self) -> str:  # type: ignore[override]
        """The banner that consoles show."""
        theirs = getattr(self.shell, "banner", "")
        return f"monarch_kernel {self.implementation_version} | %mesh up NAME -n 4 brings up ranks, %mesh? shows help\n{theirs}"

    def start(self) -> None:
        """Start serving; meanwhile, the process from which ranks are forked loads torch, unless the user does not want that."""
        super().start()  # type: ignore[no-untyped-call]
        self._interrupts.watch(self._control_loop)
        self._interrupts.install()  # ipykernel ignores SIGINT between cells; a subshell may be running one
        if self.prepares_ranks:
            self._magics.meshes.prepare()

    async def dispatch_shell(self, *args: Any, **kwargs: Any) -> None:
        """Handle a request; widget messages that arrive while a cell awaits belong to the request of that cell."""
        if kwargs.get("concurrent"):
            await super().dispatch_shell(*args, **kwargs)
            return
        try:
            with self._interrupts.request(kwargs.get("subshell_id")):
                await super().dispatch_shell(*args, **kwargs)
        finally:
            parent: dict[str, Any] = self.get_parent("shell")  # type: ignore[no-untyped-call]
            self._interrupts.cell_ended(parent.get("header", {}).get("msg_id", ""))

    def should_handle(self, stream: Any, msg: Any, idents: Any) -> Any:
        """Interrupt a cell or a message of a comm that starts, if an interrupt came while it waited for another one."""
        self._interrupts.cell_starts(msg["header"]["msg_id"])
        return super().should_handle(stream, msg, idents)  # type: ignore[no-untyped-call]

    def cell_arrived(self, id: str, subshell: str | None, content: dict[str, Any]) -> None:
        """Note a cell that may be interrupted while it waits; an interrupt is not meant for the cells that extensions send."""
        if not content.get("silent"):
            self._interrupts.cell_arrived(id, subshell)

    def message_arrived(self, id: str, subshell: str | None) -> None:
        """Note a message of a comm that may be interrupted while it waits."""
        self._interrupts.cell_arrived(id, subshell, is_message=True)

    def _as_user_code(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Handle messages of comms, which call the user's code."""

        def handled(stream: Any, ident: Any, message: Any) -> Any:
            try:
                with self._interrupts.user_code():
                    return handle(stream, ident, message)
            finally:
                self._interrupts.cell_ended(message["header"]["msg_id"])  # also while a cell awaits

        return handled

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
