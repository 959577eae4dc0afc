"""Training survives any mix of modalities: no hang, finite losses, ranks agree."""

from __future__ import annotations

import pytest
from distributed.fuzz import fuzz


def test_thirty_random_steps() -> None:
    tally = fuzz(30, block=15, seed=14)
    assert tally.steps == 30 and tally.half and tally.away and tally.sliced, tally


@pytest.mark.full
def test_a_thousand_random_steps() -> None:
    tally = fuzz(1000, block=25, seed=0)
    assert tally.without_media > 100 and tally.half > 50 and tally.sliced > 50, tally
