"""Fixtures of all tests of actors."""

from __future__ import annotations

import pytest

from tests.support.ranks import warm_up


@pytest.fixture(scope="module", autouse=True)
def warm(session: None) -> None:
    """Start the host agent and the zygote before the first test of a module, so that no test seems to leave them behind.

    An earlier module may have ended those of the session.
    """
    warm_up()
