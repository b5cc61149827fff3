"""Errors in the registration of extensions and messages; `tests/features/test_toy.py` tests a whole feature."""

from __future__ import annotations

import pytest

from monarch_kernel.net.wire.codec import add_messages, join, pack, split
from monarch_kernel.net.wire.messages import Message, Ping
from monarch_kernel.runtime.controller.extensions import Extension
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import MemoryHub


def test_an_extension_that_is_registered_too_late_is_reported() -> None:
    class Late(Extension):
        pass

    runtime = Runtime(MemoryHub().connect(), token="t")
    try:
        with pytest.raises(LookupError, match=r"test_extensions was imported after the session began"):
            runtime.extension(Late)
    finally:
        runtime.close()


def test_a_message_with_the_name_of_another_is_refused() -> None:
    class Other(Message, frozen=True, tag="Ping"):
        pass

    with pytest.raises(ValueError, match="there is another message Other: choose another name"):
        add_messages(Other)
    assert [message for message, _ in split(join([pack(Ping(1))]))] == [Ping(1)]
