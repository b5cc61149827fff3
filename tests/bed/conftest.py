"""A test bed, where one can be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed.bed import Bed, why_not


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """A controller's machine, on which the test is, and no hosts yet."""
    if why := why_not():
        pytest.skip(why)
    bed = Bed()
    try:
        with bed.entered():
            yield bed
    finally:
        bed.close()
