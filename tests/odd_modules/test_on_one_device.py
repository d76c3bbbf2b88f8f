"""Claim: with a technique of one device every row of the collection trains the numbers that it trains without, in
float64, or is refused with the reason that the row has; recompute, replay and offload do so bit by bit.
"""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.odd_modules.collection.run import FORCED, ON_BLOCKS, has_blocks, judged, on_one_device, trained
from tests.odd_modules.collection.tables import ROWS, TABLES

pytestmark = pytest.mark.filterwarnings("ignore")
NOTHING = {
    "recompute": "the step calls no child of a list|no block can run a second time",
    "chunk": "the step calls no child of a list|no part takes less in chunks|no block takes less in chunks",
    "replay": "autograd keeps nothing that a replay would make",
    "offload": "the peak is elsewhere|autograd saves nothing",
    "early_update": "the peak is elsewhere|the step has no gradients",
    "host_optimizer": "the optimizer keeps no state",
    "logits": "the step has no cross-entropy of a linear layer with eight times as many outputs",
}
"""What is said where a technique has nothing to do."""
UNCOUNTED = "is not supported: the step was not profiled"


@cache
def plain(name: str) -> dict[str, Any]:
    return trained(ROWS[name])


LONG = {("stages", "chunk"), ("no stages", "chunk")}
CELLS = [pytest.param(*cell, marks=pytest.mark.full if cell in LONG else ()) for cell in product(TABLES, FORCED)]


@pytest.mark.parametrize(("table", "technique"), CELLS)
def test_a_technique_wherever_it_can_be_is_exact_or_refused(table: str, technique: str) -> None:
    wrong = []
    for name, row in TABLES[table].items():
        if technique in ON_BLOCKS and not has_blocks(row):
            continue
        for spec in FORCED[technique]:
            if why := judged(row, technique, on_one_device(row, technique, spec), plain(name)):
                wrong.append(f"{name}, {spec}: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("technique", FORCED)
@pytest.mark.parametrize("table", TABLES)
def test_a_technique_by_its_name_is_exact_or_has_nothing_to_do(table: str, technique: str) -> None:
    """It leaves out blocks that it cannot compute."""
    wrong = []
    for name, row in TABLES[table].items():
        found = on_one_device(row, technique, None)
        if isinstance(found, str):
            words = (NOTHING[technique], UNCOUNTED, row.says.get(technique, UNCOUNTED))
            why = "" if any(re.search(one, found, re.DOTALL) for one in words) else f"refused: {found}"
        else:
            why = judged(replace(row, says={}), technique, found, plain(name))
        if why:
            wrong.append(f"{name}: {why}")
    assert not wrong, "\n".join(wrong)
