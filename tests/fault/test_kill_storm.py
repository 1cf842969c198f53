"""Workers and engines are killed at random moments, over and over. STORM_SEED in the environment repeats a storm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.storm import INTERVAL_RECORD_COUNT, Storm, new_seed

KILL_COUNT = 200


@pytest.mark.timeout(900)
def test_no_record_is_lost_or_doubled_and_few_are_done_again(tmp_path: Path) -> None:
    storm = Storm(rng=random.Random(new_seed("STORM_SEED")), folder=tmp_path)

    while storm.kill_count < KILL_COUNT:
        storm.run_stand_in()

    print(storm.describe())
    assert storm.redone_per_death <= INTERVAL_RECORD_COUNT
    # One interval, and what is answered while its segment is on its way.
    assert storm.worst_redone_count <= 5 * INTERVAL_RECORD_COUNT
