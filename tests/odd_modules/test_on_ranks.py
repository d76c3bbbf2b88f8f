"""Claim: with a technique of several ranks every row of the collection trains the numbers of one process, in float64,
or is refused with the reason that the row has.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.each import BEFORE_A_RELEASE
from tests.odd_modules.collection.on_ranks import judged_together, on_rank
from tests.odd_modules.collection.run import trained
from tests.odd_modules.collection.tables import ROWS
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.full, pytest.mark.filterwarnings("ignore")]
GRID = {"strategies": "tensor3d"}
WAYS: dict[str, tuple[dict[str, Any], int, int]] = {
    "data": ({"strategies": "S1"}, 2, 2),
    "fsdp": ({"strategies": "S1,fsdp"}, 2, 2),
    "sequence": ({"strategies": "sequence", "model_parallel_size": 2}, 2, 1),
    "pipeline": ({"strategies": "pipeline", "micro_batches": 3}, 2, 1),
    "pipeline by gpipe": ({"strategies": "pipeline", "micro_batches": 3, "schedule": "gpipe"}, 2, 1),
    "pipeline interleaved": ({"strategies": "pipeline", "micro_batches": 6, "schedule": "interleaved"}, 2, 1),
    "tensor3d over x": (GRID | {"tensor_grid": (2, 1, 1)}, 2, 1),
    "tensor3d over y": (GRID | {"tensor_grid": (1, 2, 1)}, 2, 1),
    "tensor3d over z": (GRID | {"tensor_grid": (1, 1, 2)}, 2, 2),
    "tensor3d over x and y": (GRID | {"tensor_grid": (2, 2, 1)}, 4, 1),
}
"""Options of the strategy, ranks, and parts of a batch."""
OFTEN = ("data", "fsdp", "sequence", "pipeline", "tensor3d over x")


@cache
def plain(name: str) -> dict[str, Any]:
    return trained(ROWS[name])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", [pytest.param(w, marks=() if w in OFTEN else BEFORE_A_RELEASE) for w in WAYS])
def test_every_row_is_exact_or_refused(way: str, tmp_path: Path) -> None:
    options, ranks, parts = WAYS[way]
    found = run_ranks(on_rank, ranks, tmp_path, tmp_path, [*ROWS], options, parts, timeout=600)
    wrong = {name: judged_together(name, way, [one[name] for one in found], plain(name), parts) for name in ROWS}
    wrong = {name: why for name, why in wrong.items() if why}
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
