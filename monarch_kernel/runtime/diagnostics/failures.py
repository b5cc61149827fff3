"""Turns an exception in a rank, with its frames, into a report: a `Failure`, which is plain data.

Theory of operation. The reader of a report is a user who wrote a cell or a class. A report therefore omits the frames of this
package and of IPython's machinery. It marks the frames of the user's own code, and adds their source and a short description of
the names that the failing statement mentions. The reporting process has just failed, perhaps out of memory and with a device in
an unknown state. Nothing here therefore calls code of the user (properties, ``__repr__`` of unknown types), except where Python
itself would do so to print the exception. Nothing waits for a device, sizes are bounded, and `describe` raises no exception.

Errors travel as data and not as pickled tracebacks: they are shown without the user's classes, and grouped by ranks. The
exception goes along, pickled, where that is possible.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import linecache
import logging
import os
import pickle
import re
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from monarch_kernel.base.failure_reports import FailureKind
from monarch_kernel.base.location import PACKAGE
from monarch_kernel.base.text import plural
from monarch_kernel.errors import Cause, Failure, Frame
from monarch_kernel.runtime.diagnostics.earlier_classes import notes_about_instances
from monarch_kernel.runtime.diagnostics.masking import Mask, secrets_near
from monarch_kernel.runtime.diagnostics.memory_notes import memory_notes
from monarch_kernel.runtime.diagnostics.module_errors import model_notes
from monarch_kernel.runtime.diagnostics.reprs import describe_variable, is_tensor
from monarch_kernel.runtime.diagnostics.source_names import describe_line
from monarch_kernel.runtime.diagnostics.torch_notes import torch_notes

__all__ = ["describe", "describe_frames", "is_machinery", "is_of_debugger", "is_user", "is_user_file", "starts_program"]

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger(__name__)

_MESSAGE_LENGTH = 20_000
_NAME_LENGTH = 200  # of classes, functions, files and variables, which programs may generate from data
_FILE_LENGTH = 4_096  # Linux allows no longer path
_CAUSE_LENGTH = 4_000
_MAX_CAUSES = 20
_MAX_NOTES = 50
_TRACEBACK_LENGTH = 200_000
_SOURCE_WIDTH = 400
_FIRST_FRAMES, _LAST_FRAMES = 20, 40
_MAX_VARIABLES = 24
_MAX_EXCEPTION_NBYTES = 1 << 20
_MAX_PARSED_LINES = 5_000

_PLACE = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$', re.MULTILINE)
_IPYTHON_CORE = os.sep + os.path.join("IPython", "core") + os.sep
_LIBRARY = os.path.dirname(os.__file__)
# What starts a script, what compiles a cell, and what raises BdbQuit in it.
_MACHINERY = (
    "<frozen runpy>",
    *(os.path.join(_LIBRARY, name) for name in ("runpy.py", "codeop.py", "bdb.py", "pdb.py")),
)


_starts: set[CodeType] = set()


def starts_program(function: F) -> F:
    """Mark a function of this package that runs a program of the user: reports omit its callers, which are not the user's."""
    _starts.add(function.__code__)
    return function


def describe(error: BaseException, *, kind: FailureKind = "exception", own_files: Collection[str] = ()) -> Failure:
    """Create the report of an exception that was caught in this process.

    Args:
        error: the exception, with its traceback still attached.
        kind: ``interrupted`` where the caller asked for the interruption.
        own_files: names of further files whose frames belong to this package's machinery.

    Returns:
        The report; its notes list the parts that could not be created.
    """
    unknown: list[str] = []

    def note(what: str, problem: Exception) -> None:
        _log.error("the report of a %s could not determine %s", type(error).__name__, what, exc_info=problem)
        unknown.append(f"could not determine {what}: {type(problem).__name__}: {problem}")

    try:
        mask = Mask(secrets_near(error))
    except Exception as problem:  # the report still hides what its form gives away
        mask = Mask()
        note("the values of secrets", problem)
    try:
        message = _message(error)
    except Exception:  # the user's __str__ may do anything, and must not hide the failure
        message = f"<{type(error).__name__} whose __str__ failed>"
    try:
        frames = tuple(_frames(error, own_files))
    except Exception as problem:  # a report without frames is better than no report
        frames = ()
        note("the frames", problem)
    try:
        text = _traceback_text(error, own_files)
    except Exception as problem:  # for the same reason
        text = f"{type(error).__name__}: {message}\n"
        note("the traceback", problem)
    try:
        chain = tuple(_chain(error, own_files))
    except Exception as problem:  # for the same reason
        chain = ()
        note("the causes", problem)
    try:
        added_notes = tuple(_added_notes(error))
    except Exception as problem:  # for the same reason
        added_notes = ()
        note("the notes", problem)
    try:
        notes = (*model_notes(error), *_notes_about_texts(error, own_files))
    except Exception as problem:  # an addition, which must not hide the rest
        notes = ()
        note("the module that failed", problem)
    return Failure(
        kind=kind,
        etype=_class_name(error),
        message=_masked(message, mask, _MESSAGE_LENGTH),
        frames=frames,
        traceback=_masked(text, mask, _TRACEBACK_LENGTH),
        host=socket.gethostname(),
        pid=os.getpid(),
        exception=_pickled(error),
        python=sys.executable if isinstance(error, ImportError) else "",
        notes=tuple(map(mask, (*notes, *unknown))),
        added_notes=_masked_lines(added_notes, mask),
        chain=tuple(
            replace(cause, message=mask(cause.message), notes=_masked_lines(cause.notes, mask)) for cause in chain
        ),
    )


def _masked(text: str, mask: Mask, length: int) -> str:
    """Bound a text and hide its secrets: before it is shortened to its final length, as the cut may divide a secret."""
    return _without_middle(mask(_without_middle(text, 2 * length)), length)


def _masked_lines(lines: Sequence[str], mask: Mask) -> tuple[str, ...]:
    """Hide the secrets in lines of one text, of which a secret may have several."""
    return tuple(mask("\n".join(lines)).splitlines())


# The exception itself.


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.msg:
        return str(error.msg)  # str(error) repeats file and line, which the frame shows
    if _is_quit(error):
        return "debugger quit"
    lines = [str(error)]
    for one in getattr(error, "exceptions", None) or ():  # the members of an ExceptionGroup
        if isinstance(one, BaseException):
            lines += [f"  {line}" for line in f"{type(one).__name__}: {_message(one)}".splitlines()]
            lines += [f"    {note}" for note in _added_notes(one)]
            place = _place_of(one, ()) if not hasattr(one, "exceptions") else None
            lines += [f"    at {describe_line(place)}"] if place is not None and place.user else []
    return "\n".join([*lines, ""])[:-1]  # an exact str, even if __str__ returns a subclass


def _notes_about_texts(error: BaseException, own_files: Collection[str]) -> tuple[str, ...]:
    try:
        str(error)
    except Exception:  # the user's __str__; the message says that it fails
        return ()
    return (*torch_notes(error), *_notes_about_pickling(error), *_notes_about_variables(error, own_files))


def _notes_about_pickling(error: BaseException) -> tuple[str, ...]:
    if "pickle" not in str(error).lower():
        return ()
    from monarch_kernel.runtime.diagnostics.pickle_notes import pickle_notes  # here, as it loads what reads messages

    return pickle_notes(error)


def _notes_about_variables(error: BaseException, own_files: Collection[str]) -> tuple[str, ...]:
    frames = [frame for frame, _, _ in _steps(error.__traceback__)]
    own = [frame for frame in frames if not is_machinery(frame.f_code.co_filename, own_files) and is_user(frame)]
    return (*memory_notes(error, own), *notes_about_instances(own[-1:]))


def _added_notes(error: BaseException) -> Iterator[str]:
    """Yield the lines that ``add_note()`` added; whatever else ``__notes__`` contains is left out."""
    notes = vars(error).get("__notes__")
    for note in notes[:_MAX_NOTES] if isinstance(notes, (list, tuple)) else ():
        if isinstance(note, str):
            yield from _without_middle(note, _MESSAGE_LENGTH).splitlines()


def _chain(error: BaseException, own_files: Collection[str]) -> Iterator[Cause]:
    """Yield the exceptions to which an error is chained, the nearest first, as Python prints them."""
    seen = {id(error)}
    for _ in range(_MAX_CAUSES):
        if error.__cause__ is not None:
            link, error = "caused by", error.__cause__
        elif error.__context__ is not None and not error.__suppress_context__:
            link, error = "raised while handling", error.__context__
        else:
            return
        if id(error) in seen:
            return
        seen.add(id(error))
        try:
            message = _without_middle(_message(error), _CAUSE_LENGTH)
        except Exception:  # the user's __str__ may do anything
            message = f"<{_class_name(error)} whose __str__ failed>"
        try:
            place = _place_of(error, own_files)
        except Exception:  # a cause without its line is better than none
            place = None
        yield Cause(link, _class_name(error), message, tuple(_added_notes(error)), place)


def _place_of(error: BaseException, own_files: Collection[str]) -> Frame | None:
    """Describe the innermost frame of the user's code in the traceback of a cause, or else its innermost frame."""
    steps = [step for step in _steps(error.__traceback__) if not is_machinery(step[0].f_code.co_filename, own_files)]
    if not steps:
        return _place_in_text(error)
    of_user = [step for step in steps if is_user(step[0])]
    innermost = (of_user or steps)[-1:]
    return next(describe_frames(innermost, own_files, with_variables=False), None)


def _place_in_text(error: BaseException) -> Frame | None:
    """Describe the user's line in a text that is a traceback: a pool's worker sends that of its error as a cause."""
    found = [match for match in _PLACE.finditer(_message(error)) if is_user_file(match["file"])]
    if not found:
        return None
    file, line = found[-1]["file"], int(found[-1]["line"])
    source, first_line = _around(linecache.getlines(file), line)
    return Frame(file, line, found[-1]["function"] or "<module>", source, first_line, True)


def _is_quit(error: BaseException) -> bool:
    """Whether a user has quit the debugger, which then raises this in the debugged code."""
    return type(error) is getattr(sys.modules.get("bdb"), "BdbQuit", None)


def _traceback_text(error: BaseException, own_files: Collection[str]) -> str:
    trace = _of_program(error.__traceback__)
    rendered = traceback.TracebackException(type(error), error, trace)
    own = functools.partial(is_machinery, own_files=own_files)
    is_not_ours = isinstance(error, SyntaxError) or _is_quit(error) or trace is not error.__traceback__
    pending: list[traceback.TracebackException | None] = [rendered]
    while pending:
        part = pending.pop()
        if part is None:
            continue
        if part.stack:
            kept = [summary for summary in part.stack if not own(summary.filename)]
            # If all frames belong to this package, keep them: they locate a bug in it. A syntax error or ``q`` is no such bug.
            part.stack[:] = _middle_cut(kept if kept or is_not_ours else list(part.stack))
        pending += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
    is_without_place = is_not_ours and not rendered.stack  # its text has the place, such as that of a syntax error
    return "".join(rendered.format_exception_only() if is_without_place else rendered.format())


class _BoundedBuffer(io.BytesIO):
    """A buffer that refuses to grow beyond the limit for an exception in a message."""

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_EXCEPTION_NBYTES:
            raise ValueError("the pickled exception is too large")
        return super().write(data)


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception; empty where that fails, is large, or would read tensors (which may wait for a device)."""
    # Here, because the import of cloudpickle takes longer than that of this whole file.
    from monarch_kernel.net.wire.shared_classes import ByValuePickler

    try:
        if any(is_tensor(value) for value in (*error.args, *vars(error).values())):
            return b""
        buffer = _BoundedBuffer()
        ByValuePickler(buffer).dump(error)
        data = buffer.getvalue()
        # An exception class with its own constructor can often be pickled but not rebuilt from its args.
        return data if type(pickle.loads(data)).__name__ == type(error).__name__ else b""
    except Exception:  # pickling runs code of the user's class, which may raise anything
        return b""


# Frames.


def _frames(error: BaseException, own_files: Collection[str]) -> Iterator[Frame]:
    yield from describe_frames(_steps(error.__traceback__), own_files)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        lines = linecache.getlines(error.filename)
        source, first_line = _around(lines, error.lineno)
        if not source and error.text:
            source, first_line = (error.text.rstrip("\n"),), error.lineno
        yield Frame(error.filename, error.lineno, "<module>", source, first_line, is_user_file(error.filename))


def describe_frames(
    steps: Iterable[tuple[FrameType, int, int]], own_files: Collection[str] = (), *, with_variables: bool = True
) -> Iterator[Frame]:
    """Describe frames as users know them: from their own code inward, and without those of this package.

    Args:
        steps: frame, line and last line of the expression that is running, outermost first.
        own_files: names of further files whose frames belong to this package's machinery.
        with_variables: whether to describe variables; must be False for code that is still running.
    """
    all_steps = list(steps)
    start = next((i for i in range(len(all_steps), 0, -1) if all_steps[i - 1][0].f_code in _starts), 0)
    known = [step for step in all_steps[start:] if not is_machinery(step[0].f_code.co_filename, own_files)]
    # The callers of the user's code (an event loop, a thread's run) do not help the user; the functions that it calls do.
    first = next((i for i, (frame, _, _) in enumerate(known) if is_user(frame)), 0)
    known = known[first:]
    n_left_out = len(known) - len(_middle_cut(known))
    for i, (frame, line, end) in enumerate(_middle_cut(known)):
        code, user = frame.f_code, is_user(frame)
        lines = linecache.getlines(code.co_filename, frame.f_globals)
        source, first_line = _around(lines, line)
        variables = tuple(_variables(frame, lines, line, end)) if user and with_variables else ()
        left_out = n_left_out if i == _FIRST_FRAMES else 0
        file, function = _without_middle(code.co_filename, _FILE_LENGTH), _cut(code.co_name, _NAME_LENGTH)
        yield Frame(file, line, function, source, first_line, user, variables, left_out)


def _steps(trace: TracebackType | None) -> Iterator[tuple[FrameType, int, int]]:
    """Yield frame, line and last line of the expression that was running, for each level of a traceback."""
    while trace is not None:
        line = end = trace.tb_lineno or 1  # None where the instruction has no line
        if sys.version_info >= (3, 11) and trace.tb_lasti >= 0:
            positions = trace.tb_frame.f_code.co_positions()
            _, last, _, _ = next(itertools.islice(positions, trace.tb_lasti // 2, None), (None,) * 4)
            end = max(line, last or line)
        yield trace.tb_frame, line, end
        trace = trace.tb_next


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below the function that has started the program of the user; all of it without one."""
    part = trace
    while trace is not None:
        part = trace.tb_next if trace.tb_frame.f_code in _starts else part
        trace = trace.tb_next
    return part


def _middle_cut(items: list[Any]) -> list[Any]:
    """Leave out the middle of a long list: an endless recursion has a thousand frames and little information."""
    return items if len(items) <= _FIRST_FRAMES + _LAST_FRAMES else items[:_FIRST_FRAMES] + items[-_LAST_FRAMES:]


def _around(lines: list[str], line: int) -> tuple[tuple[str, ...], int]:
    """Return the line with two lines before and after it, and the number of the first."""
    if not 1 <= line <= len(lines):
        return (), 0
    first = max(1, line - 2)
    return tuple(_cut(text.rstrip("\r\n"), _SOURCE_WIDTH) for text in lines[first - 1 : line + 2]), first


def is_machinery(file: str, own_files: Collection[str] = ()) -> bool:
    """Whether a file belongs to the machinery that runs the user's code: this package, IPython's core."""
    return file.startswith(PACKAGE) or _IPYTHON_CORE in file or file in _MACHINERY or file in own_files


def is_of_debugger(frame: FrameType) -> bool:
    """Whether a frame is the entry from traced code to the debugger; all frames below it are the debugger's, too."""
    return frame.f_code.co_name == "trace_dispatch" and frame.f_code.co_filename in _MACHINERY


def is_user(frame: FrameType) -> bool:
    """Whether a frame outside the machinery runs the user's own code: a cell, ``__main__``, a file that was not installed."""
    if frame.f_globals.get("__name__") == "__main__":
        is_start = (
            frame.f_back is None and frame.f_code.co_filename == "<string>"
        )  # of a process that ``python -c`` started
        return not (is_start or frame.f_code.co_filename.startswith("<frozen"))
    return is_user_file(frame.f_code.co_filename)


def is_user_file(file: str) -> bool:
    """Whether a file was not installed, and is not part of Python."""
    if file.startswith("<"):
        return file.startswith("<remote cell")
    parts = file.split(os.sep)
    return not ("site-packages" in parts or "dist-packages" in parts or file.startswith(_library_roots()))


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {_LIBRARY, paths["stdlib"], paths["platstdlib"]}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch:
        roots.add(os.path.dirname(torch))  # outside site-packages if torch was built in place
    return tuple(root + os.sep for root in roots | {os.path.realpath(root) for root in roots})


# Variables of the failing statement.


def _variables(frame: FrameType, lines: list[str], line: int, end: int) -> Iterator[tuple[str, str]]:
    local, outer = frame.f_locals, frame.f_globals
    seen: set[str] = set()
    for name in _mentioned(lines, line, end):
        if name in seen or len(seen) >= _MAX_VARIABLES:
            continue
        found, value = _look_up(name, local, outer)
        # Modules, functions and classes appear on every line and explain nothing.
        if not found or isinstance(value, type) or type(value).__name__ in _OMITTED_KINDS:
            continue
        seen.add(name)
        yield _cut(name, _NAME_LENGTH), _class_name(value) if name == "self" else describe_variable(name, value)


_OMITTED_KINDS = {
    "module",
    "function",
    "builtin_function_or_method",
    "method",
    "method-wrapper",
    "wrapper_descriptor",
    "type",
}


def _look_up(dotted: str, local: Mapping[str, Any], outer: Mapping[str, Any]) -> tuple[bool, Any]:
    """Find a name, or an attribute that is stored in its object, without calling a property or ``__getattr__``."""
    name, *attributes = dotted.split(".")
    if name in local:
        value = local[name]
    elif name in outer:
        value = outer[name]
    else:
        return False, None
    for attribute in attributes:
        try:
            stored = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return False, None
        tables = [stored, *(stored.get(key) or {} for key in ("_parameters", "_buffers", "_modules"))]
        holder = next((table for table in tables if type(table) is dict and attribute in table), None)
        if holder is None or type(value).__name__ == "module":
            return False, None
        value = holder[attribute]
    return True, value


def _mentioned(lines: list[str], line: int, end: int) -> Iterable[str]:
    if not 1 <= line <= len(lines):
        return ()
    statement = _statement(tuple(lines), line) if len(lines) <= _MAX_PARSED_LINES else None
    if statement is not None:
        return _names(statement)
    # Not pure Python (a cell with magics) or too long to parse: take everything that looks like a name.
    return re.findall(r"(?<![\w.])[^\W\d]\w*(?:\.\w+)*", "".join(lines[line - 1 : min(end, line + 20)]))


@functools.lru_cache(maxsize=8)
def _parsed(lines: tuple[str, ...]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statement(lines: tuple[str, ...], line: int) -> ast.stmt | None:
    """Find the innermost statement that covers a line."""
    node: ast.AST | None = _parsed(lines)
    found: ast.stmt | None = None
    while node is not None:
        covering = (child for child in _statements_below(node) if _first_line(child) <= line <= (child.end_lineno or 0))
        node = next(covering, None)
        found = node or found
    return found


def _statements_below(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from _statements_below(child)


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names and dotted names in a statement, without those in the statements of its body."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            continue
        if isinstance(child, ast.Name):
            yield child.id
        dotted = _dotted(child) if isinstance(child, ast.Attribute) else None
        # Inside out, so that a reader meets `self` before `self.weight`.
        yield from _names(child)
        if dotted:
            yield dotted


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else None
    return None


def _class_name(value: object) -> str:
    return _cut(type(value).__name__, _NAME_LENGTH)


def _without_middle(text: str, length: int) -> str:
    """Cut a long text in its middle: the last line of an error often says the most."""
    if len(text) <= length:
        return text
    mark = f" … {plural(len(text) - length, 'character')} left out … "
    n_tail = length // 4
    return f"{text[: length - n_tail - len(mark)]}{mark}{text[-n_tail:]}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
