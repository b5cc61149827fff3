"""Random faults under a stream of calls and cells: each future ends correctly, and ranks without a fault lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.actor import shutdown_context
from tests.failures.campaign import HOSTS, LOST_AFTER_S, Campaign, by_value
from tests.failures.supply import LocalSupply

FAULTS = 25
SEED = 5


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    supply: LocalSupply | None = None
    with by_value():
        try:
            supply = LocalSupply(tmp_path, HOSTS, lost_after_s=LOST_AFTER_S)
            yield Campaign(supply, SEED)
        finally:
            shutdown_context().get()
            if supply is not None:
                supply.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_faults_lose_only_the_harmed_ranks(campaign: Campaign) -> None:
    report = campaign.run(FAULTS)
    print(report.text())
    assert report.is_good, report.text()
