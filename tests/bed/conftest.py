"""A fixture for tests on a test bed; it skips them on machines that cannot have one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed.bed import Bed, why_not


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """A bed with the test on the controller's machine, and no other hosts yet."""
    if why := why_not():
        pytest.skip(why)
    bed = Bed()
    try:
        with bed.entered():
            yield bed
    finally:
        bed.close()
