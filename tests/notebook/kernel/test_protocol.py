"""Jupyter's own conformance tests, partly with code that runs on ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

import jupyter_kernel_test
import psutil
import pytest
from jupyter_kernel_test.msgspec_v5 import validate_message

from monarch_kernel.notebook.syntax.options import COMMANDS
from tests.support.waiting import LONG_S, wait_until

pytestmark = pytest.mark.timeout(120)


def has_zygote(kernel: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("zygote" in process.cmdline() for process in kernel.children(recursive=True))
    return False


class Patience:
    """Gives messages time for Jupyter's tests, which wait a tenth of a second for each, and fail on messages of other cells."""

    kc: Any
    km: Any
    get_non_kernel_info_reply: Any

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()  # type: ignore[misc]
        kernel = psutil.Process(cls.km.provisioner.pid)
        wait_until(lambda: has_zygote(kernel), "the processes that the kernel starts in advance")

    def execute_helper(
        self, code: str, timeout: float = LONG_S, **options: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        id = self.kc.execute(code=code, **options)
        reply = self.get_non_kernel_info_reply(timeout=timeout)
        assert reply is not None
        validate_message(reply, "execute_reply", id)
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["content"].get("execution_state") != "idle":
            message = self.kc.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") == id:
                validate_message(message, message["msg_type"], id)
                messages.append(message)
        busy, *between, _ = messages
        assert busy["content"]["execution_state"] == "busy"
        (given,) = [message for message in between if message["msg_type"] == "execute_input"]
        assert given["content"]["code"] == code
        return reply, [message for message in between if message is not given]


class TestLocalCells(Patience, jupyter_kernel_test.KernelTests):
    """A cell without magics of this kernel behaves as in any IPython kernel."""

    kernel_name = "monarch"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('oh', file=sys.stderr)"
    completion_samples: ClassVar[list[dict[str, Any]]] = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "%mesh ", "matches": set(COMMANDS)},
        {"text": "%%remote --ti", "matches": {"--timeout"}},
    ]
    complete_code_samples: ClassVar[list[str]] = ["1", "print('hello')", "def f(x):\n  return x\n\n"]
    incomplete_code_samples: ClassVar[list[str]] = ["print('''hello", "def f(x):\n  x*2", "%%remote\n1"]
    invalid_code_samples: ClassVar[list[str]] = ["import = 7q", "1 +* 2"]
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('no')"
    code_execute_result: ClassVar[list[dict[str, str]]] = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data: ClassVar[list[dict[str, str]]] = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))", "mime": "text/html"},
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


class TestRemoteCells(Patience, jupyter_kernel_test.KernelTests):
    """The output and displays of ranks reach the notebook in valid messages."""

    kernel_name = "monarch"
    code_hello_world = "%%remote\nprint('hello, world')"
    code_stderr = "%%remote\nimport sys; print('oh', file=sys.stderr)"
    code_page_something = "%%remote?"
    code_display_data: ClassVar[list[dict[str, str]]] = [
        {"code": "%%remote\nrank", "mime": "text/plain"},
    ]
    completion_samples: ClassVar[list[dict[str, Any]]] = [
        {"text": "%mesh down ", "matches": {"t", "--all"}},
        {"text": "%%remote t --o", "matches": {"--out"}},
    ]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        reply = cls.kc.execute_interactive("%mesh up t -n 2 --device cpu", timeout=60, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok", reply

    def test_an_error_is_an_error_message(self) -> None:
        self.flush_channels()
        reply, messages = self.execute_helper("%%remote\n1/0")
        assert reply["content"]["status"] == "error"
        assert reply["content"]["ename"] == "RemoteError"
        kinds = [message["msg_type"] for message in messages]
        assert kinds.count("error") == 1
        assert set(kinds) <= {"error", "update_display_data"}
