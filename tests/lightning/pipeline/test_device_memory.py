"""Claim: with unlike `device_memory` the rank of the smaller device has fewer blocks, and trains as one process does;
all other plans keep to the least, and say so.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.errors import PlanError
from tests.lightning.pipeline.pipeline_cases import CNN, GPT, fit, tokens
from tests.ranks import run_ranks


def runs(rank: int, ranks: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"schedule": "1f1b", "micro_batches": 4}
    alike = fit((rank, ranks), CNN(), settings, {})
    first, second = (stage.peak_bytes for stage in alike["plan"].stages)
    memory = {"device_memory": [f"{first - 1}B", f"{4 * second}B"]}
    with pytest.raises(PlanError) as error:
        fit((rank, ranks), CNN(), settings | {"device_memory": ["1GiB"] * 3}, {})
    return {
        "alike": alike,
        "memory": (first - 1, 4 * second),
        "unlike": fit((rank, ranks), CNN(), settings | memory, {}),
        "refused": str(error.value),
    }


@pytest.mark.full
@pytest.mark.ranks
def test_a_small_device_has_fewer_blocks(tmp_path: Path) -> None:
    expected = fit(None, CNN(), {}, {})["state"]
    for rank, found in enumerate(run_ranks(runs, 2, tmp_path, timeout=200)):
        unlike, alike = found["unlike"]["plan"], found["alike"]["plan"]
        assert unlike.stages[0].end < alike.stages[0].end
        assert unlike.fits
        peaks = [stage.peak_bytes for stage in unlike.stages]
        assert all(peak <= own for peak, own in zip(peaks, found["memory"], strict=True))
        assert found["unlike"]["peak"] <= found["memory"][rank]
        assert any("stages are cut by that of their own rank" in note for note in unlike.notes)
        for name, value in expected.items():
            assert torch.allclose(found["unlike"]["state"][name], value, rtol=0, atol=1e-10), name
        assert "has 3 sizes, and there are 2 devices; give one for each" in found["refused"]


@pytest.mark.parametrize("memory", [["64MiB", "32MiB"], "64MiB,32MiB"])
def test_other_plans_keep_to_the_least(memory: Any) -> None:
    found = lightning_amp.plan(GPT(), tokens()[0], devices=2, device_memory=memory, strategies="recompute")
    assert found.plan.budget_bytes == 32 * 2**20
    (note,) = (note for note in found.plan.notes if note.startswith("memory of the devices by rank: "))
    assert note.endswith("64.0 MiB, 32.0 MiB; ranks hold the same, so that the least counts for all, 32.0 MiB")
    with pytest.raises(PlanError, match="requires a plan with one budget, found unlike ones of its devices"):
        found.largest_batch()


def test_refusals() -> None:
    plan, batch = lightning_amp.plan, tokens()[0]
    with pytest.raises(PlanError, match="has 2 sizes, and there are 4 devices; give one for each, or one size"):
        plan(GPT(), batch, devices=4, device_memory=["64MiB", "32MiB"])
    for wrong in ([], 1.5j):
        with pytest.raises(PlanError, match="is not (supported|a memory size)"):
            AMPStrategy(device_memory=wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the memory size '8' has no unit"):
        AMPStrategy(device_memory=["24GiB", 8])
