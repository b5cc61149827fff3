"""What holds for all tests of actors."""

from __future__ import annotations

import pytest

from tests.support.ranks import warm_up


@pytest.fixture(scope="module", autouse=True)
def warm(session: None) -> None:
    """Before the first test of a module, the host agent and the zygote exist: a test leaves nothing behind that it starts.

    A module before this one may have ended those of the session.
    """
    warm_up()
