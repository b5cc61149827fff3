"""A feature registers an extension with messages of its own; the core has no line for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.net.wire.codec import add_messages, join, pack, split
from monarch_kernel.net.wire.messages import Message, Ping
from monarch_kernel.runtime.controller.extensions import Extension
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import MemoryHub

TOLD = """told [Count(count=1)]
told [Count(count=2)]
votes {1: 'yes', 2: 'yes'} ended True
lost [2, 1] closed True
"""


def test_a_feature_in_one_file_takes_part_in_a_session() -> None:
    # In a process of its own: what is registered stays so.
    command = [sys.executable, "-c", "from tests.runtime.controller import toy; toy.main()"]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == TOLD, run.stderr


def test_an_extension_that_was_registered_too_late_is_reported() -> None:
    class Late(Extension):
        pass

    runtime = Runtime(MemoryHub().connect(), token="t")
    try:
        with pytest.raises(LookupError, match=r"test_extensions was imported after the session began"):
            runtime.extension(Late)
    finally:
        runtime.close()


def test_a_message_with_the_name_of_another_is_refused_and_the_others_still_travel() -> None:
    class Other(Message, frozen=True, tag="Ping"):
        pass

    with pytest.raises(ValueError, match="there is another message Other: choose another name"):
        add_messages(Other)
    assert [message for message, _ in split(join([pack(Ping(1))]))] == [Ping(1)]
