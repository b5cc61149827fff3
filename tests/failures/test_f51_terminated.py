"""F51: a scheduler ends a rank by SIGTERM; the error names the signal and its likely source."""

from __future__ import annotations

import signal

from monarch_kernel.runtime.controller.exit_reasons import describe_exit


def test_the_signal_is_named() -> None:
    assert describe_exit(0, signal.SIGTERM).startswith("killed by SIGTERM (something asked it to end")
