"""F50: two kernels on one machine, or a notebook that runs twice: each has its own session, and a name is not used twice."""

from __future__ import annotations

import os
import shutil
import stat

from monarch_kernel.base.directories import make_session_directory


def test_each_session_has_a_directory_that_only_its_user_can_enter() -> None:
    first, second = make_session_directory(), make_session_directory()
    try:
        assert first != second
        assert [stat.S_IMODE(os.stat(path).st_mode) for path in (first, second)] == [0o700, 0o700]
    finally:
        shutil.rmtree(first)
        shutil.rmtree(second)
