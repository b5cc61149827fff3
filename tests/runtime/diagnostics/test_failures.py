"""The report of a failure is in the user's terms, has a bounded size, and is created whatever the exception does."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import multiprocessing.reduction
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.errors import Failure, Frame, format_ranks, rebuild_exception
from monarch_kernel.runtime.diagnostics import failures, memory_notes, stacks
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.reprs import describe_value


def raised_by(function: Callable[[], object], **options: Any) -> Failure:
    try:
        function()
    except BaseException as error:
        return describe(error, **options)
    raise AssertionError("nothing was raised")


def work(pipe: object, dataset: object, collate: object) -> None:
    """Run in no process: none can start."""


def variables_of(frame: Frame | None) -> dict[str, str]:
    assert frame is not None
    return dict(frame.variables)


def module_from(tmp_path: Path, source: str, name: str = "user_module") -> types.ModuleType:
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    module = types.ModuleType(name)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def test_the_module_imports_no_large_packages() -> None:
    heavy = "{'IPython', 'torch', 'cloudpickle', 'numpy'}"
    script = f"import sys, monarch_kernel.runtime.diagnostics.failures; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_names_the_error_and_the_process() -> None:
    failure = raised_by(lambda: 1 / 0)
    assert failure.kind == "exception"
    assert failure.headline() == "ZeroDivisionError: division by zero"
    assert (failure.host, failure.pid) == (socket.gethostname(), os.getpid())
    assert "ZeroDivisionError: division by zero" in failure.traceback
    assert isinstance(pickle.loads(failure.exception), ZeroDivisionError)
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_the_caller_marks_an_interruption() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    failure = raised_by(interrupted, kind="interrupted")
    assert (failure.kind, failure.etype, failure.message) == ("interrupted", "KeyboardInterrupt", "")


def test_frames_are_outermost_first_with_source_around_the_line(tmp_path: Path) -> None:
    module = module_from(
        tmp_path,
        """\
        def inner(a):
            b = a + 1
            c = b - b
            return b / c
            # after
            # later

        def outer():
            return inner(3)
        """,
    )
    failure = raised_by(module.outer)
    assert [frame.function for frame in failure.frames][-2:] == ["outer", "inner"]
    frame = failure.user_frame
    assert frame is not None
    assert (frame.line, frame.first_line, len(frame.source), frame.user) == (4, 2, 5, True)
    assert frame.source[frame.line - frame.first_line] == "    return b / c"
    assert frame.variables == (("b", "4"), ("c", "0"))


def test_variables_come_from_the_whole_statement_without_its_body(tmp_path: Path) -> None:
    module = module_from(
        tmp_path,
        """\
        def many(count, scale, other):
            total = max(
                count,
                int(scale),
            )
            return total

        def loop(limit, unseen):
            for i in range(limit):
                print(unseen)
        """,
    )
    assert variables_of(raised_by(lambda: module.many(1, "x", 2)).user_frame) == {"count": "1", "scale": "'x'"}
    assert variables_of(raised_by(lambda: module.loop("ten", 5)).user_frame) == {"limit": "'ten'"}


def test_attributes_are_described_without_running_properties(tmp_path: Path) -> None:
    module = module_from(
        tmp_path,
        """\
        class Trainer:
            def __init__(self):
                self.steps = 0
                self.read = []

            @property
            def lazy(self):
                self.read.append(1)
                return 1

            def step(self):
                return self.lazy / self.steps
        """,
    )
    trainer = module.Trainer()
    assert variables_of(raised_by(trainer.step).user_frame) == {"self": "Trainer", "self.steps": "0"}
    assert trainer.read == [1], "once, by the user's own code"


def test_machinery_is_left_out(tmp_path: Path) -> None:
    module = module_from(tmp_path, "def call(function):\n    return function()\n")
    failure = raised_by(lambda: module.call(lambda: format_ranks(3)))  # type: ignore[arg-type]
    assert all(failures.PACKAGE not in frame.file for frame in failure.frames)
    assert failures.PACKAGE not in failure.traceback
    hidden = raised_by(lambda: module.call(lambda: 1 / 0), own_files=[__file__])
    assert [frame.function for frame in hidden.frames] == ["call"]


def test_a_bug_in_this_package_keeps_its_traceback() -> None:
    failure = raised_by(lambda: format_ranks(3), own_files=[__file__])  # type: ignore[arg-type]
    assert failure.frames == ()
    assert "text.py" in failure.traceback


def test_library_frames_are_not_the_users() -> None:
    failure = raised_by(lambda: __import__("json").loads("{"))
    assert failure.frames[-1].function == "raw_decode"
    assert not failure.frames[-1].user
    assert failure.frames[-1].variables == ()
    assert failure.user_frame is not None
    assert failure.user_frame.file == __file__


def test_an_endless_recursion_is_cut(tmp_path: Path) -> None:
    module = module_from(tmp_path, "def down(n):\n    return up(n + 1)\ndef up(n):\n    return down(n)\n")
    failure = raised_by(lambda: module.down(0))
    assert failure.etype == "RecursionError"
    assert len(failure.frames) == 60
    assert len(failure.traceback.splitlines()) < 400


def test_a_syntax_error_has_a_frame_for_its_place(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ny = = 2\n")
    failure = raised_by(lambda: compile(path.read_text(), str(path), "exec"))
    assert failure.headline() == "SyntaxError: invalid syntax"
    frame = failure.frames[-1]
    assert (frame.file, frame.line, frame.source[frame.line - frame.first_line]) == (str(path), 2, "y = = 2")
    assert "    y = = 2\n        ^" in failure.traceback


def test_chained_causes_are_in_the_text() -> None:
    def chained() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    failure = raised_by(chained)
    assert failure.etype == "ValueError"
    assert failure.traceback.index("KeyError: 'first'") < failure.traceback.index("ValueError: second")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class NeedsTwo(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


@pytest.mark.parametrize(
    ("error", "message", "travels"),
    [
        pytest.param(ValueError(len), "<built-in function len>", True, id="usual"),
        pytest.param(NeedsTwo(1, 2), "1 2", False, id="cannot be rebuilt"),
        pytest.param(ValueError(sys._getframe()), "<frame at ", False, id="cannot be pickled"),
        pytest.param(ValueError(b"x" * (2 << 20)), "b'xxxx", False, id="too large"),
        pytest.param(Unprintable(), "<Unprintable whose __str__ failed>", True, id="cannot be printed"),
    ],
)
def test_any_exception_can_be_described(error: Exception, message: str, travels: bool) -> None:
    failure = describe(error)
    assert failure.etype == type(error).__name__
    assert failure.message.startswith(message)
    assert bool(failure.exception) == travels
    assert len(failure.message) <= 20_000


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_an_exception_group_shows_its_members() -> None:
    failure = describe(ExceptionGroup("two", [ValueError("a"), TypeError("b")]))  # noqa: F821
    assert failure.headline() == "ExceptionGroup: two (2 sub-exceptions)\n  ValueError: a\n  TypeError: b"
    with pytest.raises(ValueError, match="a") as caught:
        raise ValueError("a")
    place = describe(ExceptionGroup("one", [caught.value])).headline().splitlines()[2]  # noqa: F821
    assert ", in test_an_exception_group_shows_its_members: raise" in place
    assert place.startswith("    at ")
    assert "ValueError: a" in failure.traceback
    assert "TypeError: b" in failure.traceback


class Rude:
    def __repr__(self) -> str:
        raise AssertionError("__repr__ of an unknown type was called")


class RudeList(list[int]):
    def __len__(self) -> int:
        raise AssertionError("__len__ of an unknown type was called")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (3, "3"),
        pytest.param(10**5000, "int of 16610 bits", id="a large int"),
        (2.5, "2.5"),
        ("short", "'short'"),
        ("x" * 1000, repr("x" * 50) + "... (1000 long)"),
        ("a\nb", "'a\\nb'"),
        (b"ab", "b'ab'"),
        ((4, 3), "(4, 3)"),
        ((1,), "(1,)"),
        ([], "[]"),
        ([Rude()], "list of 1"),
        (list(range(100)), "list of 100"),
        ({"a": Rude()}, "dict of 1"),
        (Rude(), "Rude"),
        (RudeList(), "RudeList"),
    ],
)
def test_values(value: object, text: str) -> None:
    assert describe_value(value) == text
    assert len(describe_value(value)) <= 80


def test_a_long_description_is_cut() -> None:
    assert len(describe_value(("x" * 19,) * 6)) == 80


def test_a_value_that_cannot_be_described_says_so() -> None:
    torch = pytest.importorskip("torch")
    described = describe_value(torch.nn.UninitializedParameter())  # its shape raises
    assert described == "UninitializedParameter (can't be described: RuntimeError)"


def test_numpy_values() -> None:
    numpy = pytest.importorskip("numpy")
    assert describe_value(numpy.zeros((2, 3), dtype="float32")) == "ndarray[2, 3] float32"
    assert describe_value(numpy.float64(2.5)) == "2.5"


def test_tensors_and_modules() -> None:
    torch = pytest.importorskip("torch")
    assert describe_value(torch.zeros(4, 3)) == "Tensor[4, 3] float32 cpu"
    assert describe_value(torch.zeros(4, requires_grad=True)) == "Tensor[4] float32 cpu requires_grad"
    assert describe_value(torch.tensor(7)) == "Tensor[] int64 cpu = 7"
    assert describe_value(torch.zeros(2, device="meta")) == "Tensor[2] float32 meta"
    assert describe_value(torch.nn.Linear(2, 3)) == "Linear(in_features=2, out_features=3, bias=True)"
    assert describe_value(torch.float16) == "torch.float16"
    assert describe_value(torch.Size([2, 3])) == "torch.Size([2, 3])"


def test_a_shape_mismatch_names_the_shapes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    module = module_from(
        tmp_path,
        """\
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(3, 5))

            def forward(self, x):
                return torch.matmul(x, self.weight)
        """,
    )
    import torch

    failure = raised_by(lambda: module.Net()(torch.ones(2, 4)))
    assert variables_of(failure.user_frame) == {
        "x": "Tensor[2, 4] float32 cpu",
        "self": "Net",
        "self.weight": "Parameter[3, 5] float32 cpu requires_grad",
    }
    in_torch = [frame.user for frame in failure.frames if f"{os.sep}torch{os.sep}" in frame.file]
    assert in_torch
    assert not any(in_torch)


def test_an_exception_with_tensors_is_not_pickled() -> None:
    torch = pytest.importorskip("torch")
    assert describe(ValueError("bad batch", torch.zeros(2))).exception == b""


def test_describe_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug in the report")

    for part in ("_frames", "_traceback_text", "_message"):
        monkeypatch.setattr(failures, part, broken)
    failure = describe(ValueError("x"))
    assert (failure.etype, failure.frames) == ("ValueError", ())
    assert failure.traceback.startswith("ValueError: ")


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("_frames", "the frames"),
        ("_traceback_text", "the traceback"),
        ("model_notes", "the module that failed"),
    ],
)
def test_a_part_that_cannot_be_created_is_logged_and_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, what: str
) -> None:
    def fails(*args: object) -> None:
        raise KeyError("no such part")

    monkeypatch.setattr(failures, part, fails)
    failure = failures.describe(ValueError("the error of the user"))
    assert (failure.etype, failure.message) == ("ValueError", "the error of the user")
    assert failure.notes == (f"could not determine {what}: KeyError: 'no such part'",)
    (record,) = caplog.records
    assert record.getMessage() == f"the report of a ValueError could not determine {what}"


def test_frames_that_cannot_be_read_are_logged_and_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no frame")

    monkeypatch.setattr(stacks, "_stacks_of", fails)
    assert stacks.describe_thread(5, 7, "main") == [
        stacks.Activity(7, "main", thread=5, unknown="RuntimeError: no frame")
    ]
    assert len(caplog.records) == 1


def test_an_activity_says_whether_it_is_in_a_coroutine(tmp_path: Path) -> None:
    module = module_from(
        tmp_path,
        """
        def plain(look): return look()
        async def step(look): return plain(look)
        """,
    )

    def look() -> bool:
        (activity,) = stacks.describe_thread(threading.get_ident(), 7, "actor a")
        return activity.is_coroutine

    assert asyncio.run(module.step(look))
    assert not module.plain(look)


def test_a_report_has_the_notes_and_causes_of_an_exception_with_the_users_lines(tmp_path: Path) -> None:
    module = module_from(
        tmp_path,
        """
        import json

        def load(shard):
            try:
                json.loads("{")
            except ValueError as error:
                error.__notes__ = ["look at row 17", 3]
                raise

        def step():
            try:
                load(1)
            except ValueError as error:
                failed = RuntimeError("step failed")
                failed.__notes__ = ["in step 5\\nof 9"]
                raise failed from error
        """,
    )
    failure = raised_by(module.step)
    assert failure.added_notes == ("in step 5", "of 9")
    (cause,) = failure.chain
    assert (cause.link, cause.etype, cause.notes) == ("caused by", "JSONDecodeError", ("look at row 17",))
    assert cause.headline.startswith("JSONDecodeError: Expecting property name")
    assert cause.frame is not None
    assert (cause.frame.function, cause.frame.line) == ("load", 6)
    assert cause.frame.source[cause.frame.line - cause.frame.first_line].strip() == 'json.loads("{")'
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_causes_are_those_that_python_prints() -> None:
    def chained(*, hides: bool, circle: bool = False) -> Failure:
        first, second = KeyError("w"), ValueError("no weight")
        second.__context__ = first
        second.__suppress_context__ = hides
        if circle:
            first.__context__ = second
        return describe(second)

    assert [(cause.link, cause.headline) for cause in chained(hides=False).chain] == [
        ("raised while handling", "KeyError: 'w'")
    ]
    assert chained(hides=True).chain == ()
    assert len(chained(hides=False, circle=True).chain) == 1


def test_notes_of_the_members_of_a_group_are_in_its_text() -> None:
    class Group(Exception):
        exceptions: tuple[Exception, ...] = ()

    member, group = ValueError("row 7"), Group("two rows")
    member.__notes__ = ["in a.csv"]  # type: ignore[attr-defined]
    group.exceptions = (member,)
    assert describe(group).message == "two rows\n  ValueError: row 7\n    in a.csv"


def test_the_frames_of_an_endless_recursion_are_counted(tmp_path: Path) -> None:
    module = module_from(tmp_path, "def down(n):\n    return down(n + 1) if n < 400 else 1 / 0\n")
    failure = raised_by(lambda: module.down(1))
    assert len(failure.frames) + sum(frame.left_out for frame in failure.frames) == 402  # 400, with two of this test


def test_the_end_of_a_long_message_is_kept() -> None:
    failure = describe(ValueError("x" * 50_000 + " the reason"))
    assert failure.message.endswith(" the reason")
    assert "characters left out" in failure.message


def test_a_rebuilt_exception_has_its_notes_and_the_traceback_of_the_rank() -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} {b}")

    for error in (ValueError("x"), Odd(1, 2)):
        error.__notes__ = ["look at row 17"]  # type: ignore[attr-defined]
        notes = rebuild_exception(describe(error)).__notes__  # type: ignore[attr-defined]
        assert notes[0] == "look at row 17"
        assert notes[1].startswith("Traceback on the rank:\n")
        assert len(notes) == 2


def test_a_cause_that_is_the_text_of_a_workers_traceback_has_the_users_line(tmp_path: Path) -> None:
    module = module_from(tmp_path, "def square(x):\n    raise ValueError('row 7')\n")
    worker_error = raised_by(lambda: module.square(1))
    error = ValueError("row 7")
    error.__cause__ = RuntimeError(f'\n"""\n{worker_error.traceback}"""')
    (cause,) = describe(error).chain
    assert cause.headline == "RuntimeError: ValueError: row 7"
    assert cause.frame is not None
    assert (cause.frame.file, cause.frame.line, cause.frame.function) == (
        module.square.__code__.co_filename,
        2,
        "square",
    )


def test_what_torch_could_not_pickle_is_named_by_its_path() -> None:
    import io

    import torch

    failure = raised_by(lambda: torch.save({"hooks": [1, lambda: 1]}, io.BytesIO()))
    assert failure.notes == ("obj['hooks'][1] (a function) can't be pickled",)
    assert raised_by(lambda: {}["pickle"]).notes == ()


def test_what_a_worker_process_could_not_be_sent_is_named_as_a_parameter_of_its_function(tmp_path: Path) -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)  # can only be pickled while a process starts
    starting = SimpleNamespace(DupFd=int, duplicate_for_child=int)
    module = module_from(tmp_path, "def start(dump, process, file): dump(process, file)")

    def failure_of(target: Callable[..., object], *args: object, **kwargs: object) -> Failure:
        process = multiprocessing.get_context("spawn").Process(target=target, args=args, kwargs=kwargs)
        multiprocessing.context.set_spawning_popen(starting)  # type: ignore[arg-type]
        try:
            return raised_by(lambda: module.start(multiprocessing.reduction.dump, process, io.BytesIO()))
        finally:
            multiprocessing.context.set_spawning_popen(None)

    with reader, writer:
        rows = [1, {"lock": threading.Lock()}]
        advice = "define it by its own statement in a cell, outside of functions, or start the process by fork"
        assert failure_of(work, reader, [1], collate=lambda rows: rows).notes == (
            f"collate (a function) can't be pickled: {advice}",
        )
        assert failure_of(work, reader, rows, None).notes == ("dataset[1]['lock'] (a lock) can't be pickled",)
        assert failure_of(print, reader, rows).notes == ("args[1][1]['lock'] (a lock) can't be pickled",)
        assert failure_of(pickle.dumps, obj=rows).notes == ("obj[1]['lock'] (a lock) can't be pickled",)
    sent = raised_by(lambda: multiprocessing.reduction.ForkingPickler.dumps([work, threading.Lock()]))
    assert sent.notes == ("obj[1] (a lock) can't be pickled",)


def test_out_of_memory_names_the_largest_variables(tmp_path: Path) -> None:
    import torch

    module = module_from(
        tmp_path,
        """
        import torch

        rows = torch.zeros(1 << 20)
        view = rows[:10]
        net = torch.nn.Linear(1024, 1024)
        small = torch.zeros(3)

        def step():
            batches = {"a": [torch.zeros(2 << 20)]}
            torch.empty(1 << 60)

        def fail():
            raise MemoryError

        class Trainer:
            def __init__(self):
                self.weights = torch.zeros(4 << 20)

            def step(self):
                raise MemoryError
        """,
    )
    assert raised_by(module.Trainer().step).notes[1] == "  16 MiB self.weights: Tensor[4194304] float32 cpu"
    failure = raised_by(module.step)
    assert "allocate" in failure.message
    assert failure.notes[:5] == (
        "the largest variables:",
        "  8.0 MiB batches: dict of 1",
        "  4.0 MiB net: Linear(in_features=1024, out_features=1024, bias=True)",
        "  4.0 MiB rows: Tensor[1048576] float32 cpu",
        "  4.0 MiB view: Tensor[10] float32 cpu",
    )
    assert failure.notes[5].startswith("the process held ")
    assert "  4.0 MiB net: Linear" in raised_by(module.fail).notes[1]
    assert raised_by(lambda: torch.zeros(2) + torch.zeros(3)).notes == ()


def test_a_gpu_out_of_memory_has_a_snapshot_of_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory_notes.tempfile, "gettempdir", lambda: str(tmp_path))
    assert raised_by(fail).notes == ()  # no GPU has been used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [1]})
    folder = tmp_path / f"monarch-memory-{os.getuid()}"
    (note,) = raised_by(fail).notes
    assert (
        note
        == f"what the GPU held is in {folder}, in a file named by the pid: open it at https://docs.pytorch.org/memory_viz"
    )
    (file,) = folder.iterdir()
    assert (file.name, pickle.loads(file.read_bytes())) == (f"{os.getpid()}.pickle", {"segments": [1]})
    assert folder.stat().st_mode & 0o077 == 0
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")  # a trap of another user
    assert raised_by(fail).notes == ()


def test_an_error_that_a_killed_loader_worker_causes_names_it() -> None:
    """Its queue may end in the middle of a batch, before torch has looked at the worker."""

    class Loader:
        def __init__(self) -> None:
            self._workers = [SimpleNamespace(pid=17, exitcode=None), SimpleNamespace(pid=18, exitcode=-9)]

        def read(self) -> None:
            raise EOFError

    notes = raised_by(Loader().read).notes
    assert notes[0] == "worker 1 of 2 (pid 18) was killed by SIGKILL"
    assert raised_by(lambda: [].pop()).notes == ()
