"""IPython's shell of a rank: without a terminal, threads or files.

Theory of operation. `RankShell` is IPython's shell without the parts for a person at a terminal: history and profile on disk,
prompts, colours, input, printed tracebacks. It gives cells their magics, ``!cmd``, display formatters and hooks, and
``get_ipython()`` returns it. It shows nothing itself: displays are published, and if IPython wants to print an error as a
traceback, the shell keeps the error for the caller that runs the cell.

Invariants:

1. Text printed before a display has left this process's buffers before the display is published.
2. There is no output cache, and only the text of the latest cells is kept: neither grows with the number of cells.
3. ``close`` restores what the shell replaced in the process: ``sys.modules["__main__"]``, ``input``, hooks.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import getpass
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
from IPython.core import interactiveshell
from IPython.core.autocall import ExitAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.utils.text import LSString, SList
from traitlets import Instance, Type, default
from traitlets.config import Config

from monarch_kernel.runtime.diagnostics.mime import encoded, encoded_metadata

__all__ = ["Publish", "RankShell", "current_shell", "flush", "no_getpass", "no_input", "prepare"]

Publish = Callable[[dict[str, Any], dict[str, Any]], None]
"""Takes the data and the metadata of a display, each by MIME type."""

_KEPT_SOURCES = 500
_KEPT_ERRORS = 20
_COMMAND_GRACE_S = 1.0
_STOP_S = 0.2
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_NO_STDIN = (
    "{0} does not work on a rank: ranks run in parallel and have no keyboard. "
    'Ask in a local cell and push the answer, such as trainers["answer"] = {1} for a mesh named trainers.'
)


class _Sources:
    """The text of the last cells, in `linecache`, for tracebacks and ``inspect.getsource``.

    Cells that define something are counted separately: a thousand one-line cells must not drop the source of the model.
    """

    def __init__(self) -> None:
        self._defining: dict[str, None] = {}
        self._others: dict[str, None] = {}

    def keep(self, name: str, text: str) -> None:
        lines = [line + "\n" for line in text.rstrip("\n").split("\n")]
        linecache.cache[name] = (len(text), None, lines, name)  # no time of change: checkcache() leaves it alone
        self._defining.pop(name, None)
        self._others.pop(name, None)
        names = self._defining if "def " in text or "class " in text or "lambda" in text else self._others
        names[name] = None
        if len(names) > _KEPT_SOURCES:
            oldest = next(iter(names))
            del names[oldest]
            linecache.cache.pop(oldest, None)

    def drop(self) -> None:
        for name in (*self._defining, *self._others):
            linecache.cache.pop(name, None)


class _RankCompiler(CachingCompiler):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources = _Sources()

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Name and keep the code of a nested cell (``%%capture`` and the like); the base class would keep all of them."""
        name = self.get_code_name(transformed_code, transformed_code, number)
        self.sources.keep(name, transformed_code)
        return name


class _RankDisplayHook(DisplayHook):
    """The ``sys.displayhook``: shows values that are not the cell's own, as displays."""

    shell: Any

    def __call__(self, result: Any = None) -> None:
        if result is not None:
            self.shell.remember(result)
            self.fill_exec_result(result)  # type: ignore[no-untyped-call]
            self.shell.display_pub.publish(*self.shell.represent(result))


class _RankPublisher(DisplayPublisher):
    def publish(
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        self._validate_data(data, metadata)  # type: ignore[no-untyped-call]
        bundle = encoded(data)
        about = encoded_metadata(metadata or {}, bundle)
        display_id = (transient or {}).get("display_id")
        if display_id is not None:
            about["monarch_kernel"] = {"display_id": str(display_id), "update": bool(update)}
        flush()
        self.shell.emit(bundle, about)

    def clear_output(self, wait: bool = False) -> None:
        flush()
        self.shell.emit({}, {"monarch_kernel": {"clear_output": wait}})


class _RankExit(ExitAutocall):
    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)


class RankShell(InteractiveShell):
    """IPython's shell, which shows nothing itself: displays go to ``emit``, errors to ``shown``."""

    compiler_class = Type(_RankCompiler)
    displayhook_class = Type(_RankDisplayHook)
    display_pub_class = Type(_RankPublisher)
    exiter = Instance(ExitAutocall)

    display_formatter: Any
    emit: Publish | None
    shown: list[BaseException]
    pages: list[str]

    @default("exiter")
    def _default_exiter(self) -> ExitAutocall:
        return _RankExit(self)  # type: ignore[no-untyped-call]

    @property
    def sources(self) -> _Sources:
        """The text of the last cells."""
        compiler = self.compile
        assert isinstance(compiler, _RankCompiler)
        return compiler.sources

    @property
    def db(self) -> dict[str, Any]:
        """Data that ``%cd`` and aliases remember. IPython keeps it on disk, where all ranks would share it."""
        return self._memory

    @db.setter
    def db(self, value: object) -> None:
        """Ignore the database that older versions of IPython open."""

    def init_instance_attrs(self) -> None:
        super().init_instance_attrs()  # type: ignore[no-untyped-call]
        self.emit = None
        self.shown = []
        self.pages: list[str] = []
        self._memory: dict[str, Any] = {}
        self._last: Any = ""

    def init_ipython_dir(self, ipython_dir: object) -> None:
        """Use no directory: ranks that start together would fight for it."""

    def init_profile_dir(self, profile_dir: object) -> None:
        """Use a profile without a directory, for the same reason."""
        self.profile_dir = ProfileDir()

    def init_prompts(self) -> None:
        """Set no prompts: libraries take ``sys.ps1`` for an interactive session, and Lightning then refuses to run."""

    def init_virtualenv(self) -> None:
        """Leave ``sys.path`` as the process that started this one has set it."""

    def init_display_formatter(self) -> None:
        super().init_display_formatter()  # type: ignore[no-untyped-call]
        self.display_formatter.active_types = self.display_formatter.format_types

    def enable_gui(self, gui: str | None = None) -> None:
        if gui not in (None, "inline"):
            raise UsageError(f"a rank has no event loop for the GUI {gui!r}; use %matplotlib inline")

    def ask_exit(self) -> None:
        raise SystemExit

    def remember(self, value: Any) -> None:
        """Bind ``_``, unless the user (or gettext) uses that name. Only the last value: each may be a large tensor."""
        names = self.user_ns
        if "_" not in builtins.__dict__ and names.get("_", self._last) is self._last:
            self._last = names["_"] = value

    def represent(self, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a value's representations by MIME type, and their metadata."""
        before = len(self.shown)
        data, metadata = self.display_formatter.format(value)
        if "text/plain" in data:  # the error of a broken _repr_html_ is printed, but the value can be shown
            for error in self.shown[before:]:
                traceback.print_exception(type(error), error, error.__traceback__)
            del self.shown[before:]
        bundle = encoded(data)
        return bundle, encoded_metadata(metadata, bundle)

    def take_pages(self) -> dict[str, Any]:
        """Return pages for a pager (``x?`` and the like), which a rank does not have, as the representation of a value."""
        text = "\n".join(self.pages)
        self.pages.clear()
        return {"text/plain": text} if text else {}

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Keep an error that IPython wants to print as a traceback; ``%tb`` prints the last one."""
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is None:
            print(
                "No traceback of this cell to show; in a local cell %tb shows that of an earlier one.", file=sys.stderr
            )
        elif len(self.shown) < _KEPT_ERRORS:
            self.shown.append(error)

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        self.showtraceback()

    def showindentationerror(self) -> None:
        self.showtraceback()

    def system(self, cmd: str) -> None:
        """Run a command in the system's shell; its output goes where the rank's output goes."""
        captured = not _writes_to_fd_1(sys.stdout)
        status, text = _command(self.var_expand(cmd, depth=1), captured)  # type: ignore[no-untyped-call]
        if captured:
            sys.stdout.write(text)
        self._set_exit_code(cmd, status)

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Run a command in the system's shell and return its output."""
        status, text = _command(self.var_expand(cmd, depth=depth + 1), True)  # type: ignore[no-untyped-call]
        if getattr(self, "system_raise_on_error", False):
            self._set_exit_code(cmd, status)
        return SList(text.splitlines()) if split else LSString(text)

    def _set_exit_code(self, cmd: str, status: int) -> None:
        self.user_ns["_exit_code"] = status
        if status and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(status, cmd)

    def open(self, publish: Publish) -> None:
        """Make this the shell of the process for good: actors and callbacks may use what cells can use, too."""
        self.emit = publish
        self.save_sys_module_state()  # type: ignore[no-untyped-call]
        self.init_sys_modules()  # type: ignore[no-untyped-call]
        self.builtin_trap.__enter__()
        self.display_trap.__enter__()
        self._getpass = getpass.getpass
        getpass.getpass = no_getpass

    def close(self) -> None:
        """Undo the shell's changes to the process."""
        getpass.getpass = self._getpass
        self.display_trap.__exit__(None, None, None)
        self.builtin_trap.__exit__(None, None, None)
        self.cleanup()  # type: ignore[no-untyped-call]
        self.sources.drop()
        for file in self.tempfiles:
            file.unlink(missing_ok=True)
        for folder in self.tempdirs:
            with contextlib.suppress(OSError):
                folder.rmdir()
        type(self).clear_instance()


def current_shell() -> RankShell | None:
    """Return the shell of this process; None if it has none, as a rank that has run no cell."""
    shell = InteractiveShell.instance() if InteractiveShell.initialized() else None
    return shell if isinstance(shell, RankShell) else None


def prepare(main: types.ModuleType | None = None) -> None:
    """Make the shell of this process, if there is none, without using it; its cells run in the module ``main``, or a new one.

    It takes 15 ms: the process from which ranks are forked does this once, for all of them.
    """
    if InteractiveShell.initialized():
        return
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    if "PickleShareDB" in vars(interactiveshell):  # before IPython 9.18 a shell opens it when it is made
        vars(interactiveshell)["PickleShareDB"] = lambda root: {}
    main = types.ModuleType("__main__") if main is None else main
    shell: RankShell = RankShell.instance(
        config=config,
        user_module=main,
        user_ns=main.__dict__,
        autoindent=False,
        cache_size=0,  # ``Out`` would keep every tensor that was ever shown
        colors="nocolor",
    )
    shell.set_hook("show_in_pager", _page, 0)  # type: ignore[no-untyped-call]
    shell.cleanup()  # type: ignore[no-untyped-call]
    atexit.unregister(shell.atexit_operations)
    for name in ("__", "___"):
        main.__dict__.pop(name, None)
    shell.builtin_trap.auto_builtins["input"] = no_input
    # Do here once what happens at first use.
    shell.transform_cell("x = 1")  # type: ignore[no-untyped-call]
    shell.represent(1)


def _page(shell: RankShell, data: Any, start: int = 0, screen_lines: int = 0) -> None:
    text = str(data.get("text/plain", "") if isinstance(data, Mapping) else data)
    # An address means nothing to the reader, and would make equal objects of several ranks different.
    text = re.sub(r"(?<= at 0x)[0-9a-f]{6,16}(?=>)", "…", text.strip("\n"))
    shell.pages.append(re.sub(r"(?m)^(File: +)\S*/(?=<remote cell)", r"\1", text))


def no_input(prompt: object = "", /) -> str:
    """Replaces ``input`` on a rank."""
    raise StdinNotImplementedError(_NO_STDIN.format("input()", "input(...)"))


def no_getpass(prompt: str = "Password: ", stream: object = None, **_: object) -> str:
    """Replaces ``getpass.getpass`` on a rank."""
    raise StdinNotImplementedError(_NO_STDIN.format("getpass()", "getpass.getpass()"))


def flush() -> None:
    """Flush the buffers of printed text."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, broken or closed by the cell
            stream.flush()


def _writes_to_fd_1(stream: Any) -> bool:
    try:
        return bool(stream.fileno() == 1)
    except (AttributeError, OSError, ValueError):
        return False


def _command(command: str, captured: bool) -> tuple[int, str]:
    """Run a shell command; an interrupt ends it and all processes that it started."""
    flush()
    shell = os.environ.get("SHELL", "")
    process = None
    try:
        with _interrupts_later():  # an interrupt while the process starts would lose it
            process = subprocess.Popen(
                command,
                shell=True,
                executable=shell if os.access(shell, os.X_OK) else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if captured else None,
                stderr=subprocess.STDOUT if captured else None,
                text=True,
                errors="replace",
            )
        text, _ = process.communicate()
    except BaseException:
        if process is not None:
            with _interrupts_later():
                _end(process)
        raise
    status = process.returncode
    return -(status - 128) if status > 128 else status, text or ""


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold back interrupts of the main thread until the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, types.FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda *signal_and_frame: arrived.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if arrived and callable(handler):
        handler(*arrived[-1])


def _end(process: subprocess.Popen[str]) -> None:
    # The command is in the rank's process group, so that it ends with the rank. So its processes are found by descent, and
    # stopped until all are known, because one that runs may start another.
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [psutil.Process(process.pid)]
        while found:
            for member in found:
                _signal(member, signal.SIGSTOP)
            family += found
            # A process between fork and exec may keep its parent from stopping; the parent then starts nothing either.
            deadline = time.monotonic() + _STOP_S
            while time.monotonic() < deadline and not all(map(_is_stopped, family)):
                os.sched_yield()
            found = [child for child in family[0].children(recursive=True) if child not in family]
    for signum in (signal.SIGINT, signal.SIGCONT):
        for member in family:
            _signal(member, signum)
    _, left = psutil.wait_procs(family, timeout=_COMMAND_GRACE_S)
    for member in left:
        _signal(member, signal.SIGKILL)
    process.wait()


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in _STOPPED
    except psutil.NoSuchProcess:  # it ended before it could be stopped, and its parent has collected it
        return True


def _signal(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(signum)  # not os.kill(): another process may have the number now
