"""Claim: of the plans that were measured at a size the one that `auto` would choose is hardly slower than the fastest.

The table was measured once, on one machine (benchmarks/time_model/time_grid.py): nothing is timed here.
"""

import json

from benchmarks.time_model.time_grid import TABLE, judge

SIZES = 60
NEAR = 1.05


def test_the_plan_that_is_predicted_to_be_fastest_is() -> None:
    found = judge(TABLE)
    assert len(found) >= SIZES
    assert sum(ratio <= NEAR for ratio, _ in found) / len(found) >= 0.93
    assert max(ratio for ratio, _ in found) <= 1.18
    assert max(ratio for ratio, words in found if "1 x 2:" in words) <= 1.06
    assert max(ratio for ratio, words in found if "1 x 1:" in words) <= NEAR


def test_the_table_has_several_threads_and_ranks() -> None:
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    assert {(row["ranks"], row["threads"]) for row in rows} >= {(1, 1), (1, 2), (2, 1)}
