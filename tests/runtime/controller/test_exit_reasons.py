"""The text about the end of a process names the out-of-memory killer only with evidence."""

from __future__ import annotations

import signal

from monarch_kernel.runtime.controller.exit_reasons import describe_exit


def test_a_sigkill_says_what_is_known() -> None:
    assert describe_exit(0, signal.SIGKILL, 181 << 20) == (
        "killed by SIGKILL (a kill -9 by a person, a program or the job's scheduler; nothing points to the out-of-memory "
        "killer); it held 181 MiB at the last reading"
    )
    assert describe_exit(0, signal.SIGKILL, 0, "oom_kill in /x rose from 3 to 4", "little") == (
        "killed by SIGKILL (by the kernel's out-of-memory killer: oom_kill in /x rose from 3 to 4)"
    )
    assert describe_exit(0, signal.SIGKILL, 0, "", "at the last reading there were 64 MiB of free memory") == (
        "killed by SIGKILL (likely by the kernel's out-of-memory killer: at the last reading there were 64 MiB of free "
        "memory)"
    )


def test_other_ends_are_described_by_signal_or_exit_code() -> None:
    assert describe_exit(7, 0) == "the process ended with exit code 7"
    what = describe_exit(0, signal.SIGTERM, 0, "oom_kill rose")
    assert what.startswith("killed by SIGTERM (something asked it to end: likely a scheduler that preempts")


def test_an_abort_for_lack_of_descriptors_differs_from_others() -> None:
    assert "different shapes" in describe_exit(0, signal.SIGABRT, last_lines=["[enforce fail at pair.cc:446] 8 vs 4"])
    assert "shapes" not in describe_exit(0, signal.SIGABRT, last_lines=["Fatal Python error: Aborted"])
    lines = ["[enforce fail at listener.cc:55] false. accept: Too many open files", "Fatal Python error: Aborted"]
    assert "no file descriptor left" in describe_exit(0, signal.SIGABRT, last_lines=lines)
