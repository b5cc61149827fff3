"""Random transfers, and kills during them: no byte is wrong, each future ends, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.actor import shutdown_context
from tests.failures.campaign import by_value
from tests.failures.transfers import TransferCampaign

TRANSFERS = 300
SEED = 3


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[TransferCampaign]:
    campaign: TransferCampaign | None = None
    with by_value():
        try:
            campaign = TransferCampaign(tmp_path, SEED)
            yield campaign
        finally:
            shutdown_context().get()
            if campaign is not None:
                campaign.close()


@pytest.mark.slow
def test_random_transfers_have_no_wrong_byte(campaign: TransferCampaign) -> None:
    report = campaign.run(TRANSFERS)
    print(report.text())
    assert report.is_good, report.text()
    assert {"by process", "by memory", "by messages"} <= report.transfers.keys()
    assert report.kinds["a rank is killed"] > 2
