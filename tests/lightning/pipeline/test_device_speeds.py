"""Claim: with device_speeds="measure" a rank that reaches less has fewer blocks, and trains as one process does."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_amp.lightning.strategy import measured_rates
from tests.lightning.pipeline.pipeline_cases import GPT, fit
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def runs(rank: int, ranks: int) -> dict[str, Any]:
    settings = {"schedule": "1f1b", "micro_batches": 4}
    # larger products take rank 0 longer, as if it were slow
    rows = 512 if rank == 0 else 192
    with (
        patch.object(measured_rates, "SPEED_SIZE", rows),
        patch.object(measured_rates, "SPEED_S", 0.2),
    ):
        speeds = measured_rates.measured_speeds(torch.device("cpu"), ranks)
        slow = fit((rank, ranks), GPT(), {**settings, "device_speeds": "measure"}, {})
    return {"speeds": speeds, "slow": slow, "alike": fit((rank, ranks), GPT(), settings, {})}


def test_a_slow_rank_has_fewer_blocks(tmp_path: Path) -> None:
    found = run_ranks(runs, 2, tmp_path, timeout=200)
    first, other = (one["speeds"] for one in found)
    assert first == other
    assert first[0] < 0.5
    assert first[1] == 1.0
    expected = fit(None, GPT(), {}, {})["state"]
    for one in found:
        slow, alike = one["slow"]["plan"], one["alike"]["plan"]
        assert slow.stages[0].end < alike.stages[0].end
        assert any(note.startswith("speeds of the ranks, measured") for note in slow.notes)
        for name, value in expected.items():
            assert torch.allclose(one["slow"]["state"][name], value, rtol=0, atol=1e-10), name
