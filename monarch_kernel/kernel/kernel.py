"""The kernel: ipykernel's, with our magics built in, which ends its ranks when it ends."""

from __future__ import annotations

import inspect
import signal
from importlib.metadata import version
from types import FrameType
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.kernel.tab import RemoteTab
from monarch_kernel.notebook.magics import load

__all__ = ["MonarchKernel"]

# What calls the user's code, and handles whatever it raises.
_CALLERS = frozenset(
    function.__code__
    for function in (
        InteractiveShell.run_code,
        InteractiveShell.user_expressions,
        IPythonKernel.do_complete,
        IPythonKernel.do_inspect,
    )
)


def strike_user_code(signum: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise KeyboardInterrupt if the user's code runs, else do nothing."""
    __tracebackhide__ = True  # the user did not call this
    while frame is not None:
        if frame.f_code in _CALLERS:
            raise KeyboardInterrupt
        frame = frame.f_back


class MonarchKernel(RemoteTab):
    """An IPython kernel that is the single controller of meshes of ranks."""

    implementation = "monarch_kernel"
    implementation_version = version("monarch_kernel")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert self.shell is not None
        self._magics = load(self.shell)
        self.names = self._magics.names

    @property
    def banner(self) -> str:  # type: ignore[override]
        """Shown by consoles."""
        theirs = getattr(self.shell, "banner", "")
        return f"monarch_kernel {self.implementation_version} | %mesh up NAME -n 4 brings up ranks, %mesh? says more\n{theirs}"

    def start(self) -> None:
        """Serve; the process that ranks are forked from loads torch meanwhile."""
        super().start()  # type: ignore[no-untyped-call]
        self._magics.meshes.prepare()

    def pre_handler_hook(self) -> None:
        """Before a request is handled: from now on an interrupt means the user's code."""
        super().pre_handler_hook()  # type: ignore[no-untyped-call]
        signal.signal(signal.SIGINT, strike_user_code)

    async def do_shutdown(self, restart: bool) -> Any:
        """End the ranks, then the kernel."""
        self._magics.meshes.close()
        reply = super().do_shutdown(restart)  # type: ignore[no-untyped-call]
        return await reply if inspect.isawaitable(reply) else reply
