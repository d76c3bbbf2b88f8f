"""Claim: with device_speeds="measure" a rank that reaches less has fewer blocks, with unlike `device_memory` that of
the smaller device, and both train as one process does; of a rank under a quota the speed is that of the quota, wherever
in the quota's period it begins; plans without stages keep to the least memory, and say so.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.errors import PlanError
from lightning_amp.lightning.strategy import hardware
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import ends_of
from tests.lightning.pipeline.pipeline_cases import CNN, GPT, batches_of, fit, tokens
from tests.planning.profiles import hic, profile, rna
from tests.ranks import run_ranks

PERIOD, PRODUCT = 0.1, 1e-3
"""Seconds: of Linux's quotas, and of a matrix product."""


class Quota:
    """A processor that is given for a share of every period, from a moment within one on; time passes by working."""

    def __init__(self, share: float, begin: float) -> None:
        self.now, self._share, self._unused = begin, share, share * PERIOD

    def clock(self) -> float:
        return self.now

    def work(self) -> None:
        left = PRODUCT
        while left > 1e-12:
            end = (int(self.now / PERIOD + 1e-9) + 1) * PERIOD
            step = min(left, self._unused, end - self.now)
            self.now, self._unused, left = self.now + step, self._unused - step, left - step
            if self._unused < 1e-12 or end - self.now < 1e-12:
                self.now, self._unused = end, self._share * PERIOD


@pytest.mark.parametrize("begin", [0.0, 0.013, 0.05, 0.077, 0.099])
def test_a_quota_s_share_is_found_wherever_its_period_begins(begin: float) -> None:
    for share in (0.5, 0.25, 0.125):
        quota = Quota(share, begin)
        counts = hardware.done_in_windows(quota.work, 1.0, 4, quota.clock)
        assert len(counts) == 3
        assert counts == pytest.approx([share / PRODUCT] * 3, rel=0.02)


def runs(rank: int, ranks: int) -> dict[str, Any]:
    """Stages of ranks that are alike, of a slow rank 0, and of a rank 0 with less memory than it took."""
    me, settings = (rank, ranks), {"schedule": "1f1b", "micro_batches": 4}
    alike = fit(me, CNN(), settings, {})
    # larger products take rank 0 longer, as if it were slow
    rows = 512 if rank == 0 else 192
    with patch.object(hardware, "SPEED_SIZE", rows), patch.object(hardware, "SPEED_S", 0.2):
        speeds = hardware.measured_speeds(torch.device("cpu"), ranks)
        slow = fit(me, CNN(), settings | {"device_speeds": "measure"}, {})
    first, second = (stage.peak_bytes for stage in alike["plan"].stages)
    memory = (first - 1, 4 * second)
    small = fit(me, CNN(), settings | {"device_memory": [f"{n}B" for n in memory]}, {})
    with pytest.raises(PlanError) as error:
        fit(me, CNN(), settings | {"device_memory": ["1GiB"] * 3}, {})
    refused = str(error.value)
    return {"alike": alike, "slow": slow, "small": small, "speeds": speeds, "memory": memory, "refused": refused}


@pytest.mark.full
@pytest.mark.ranks
def test_a_slow_or_small_device_has_fewer_blocks(tmp_path: Path) -> None:
    expected, every = fit(None, CNN(), {}, {})["state"], run_ranks(runs, 2, tmp_path, timeout=200)
    for rank, found in enumerate(every):
        assert found["speeds"] == every[0]["speeds"]
        assert found["speeds"][0] < 0.5
        assert found["speeds"][1] == 1.0
        for name, said in (
            ("slow", "speeds of the ranks, by that of the fastest"),
            ("small", "memory of the devices by rank: "),
        ):
            plan = found[name]["plan"]
            assert plan.stages[0].end < found["alike"]["plan"].stages[0].end, name
            assert any(note.startswith(said) for note in plan.notes), plan.notes
            for key, value in expected.items():
                assert torch.allclose(found[name]["state"][key], value, rtol=0, atol=1e-10), f"{name}: {key}"
        small = found["small"]["plan"]
        assert small.fits
        assert any("stages are cut by that of their own rank" in note for note in small.notes)
        assert all(s.peak_bytes <= own for s, own in zip(small.stages, found["memory"], strict=True))
        assert found["small"]["peak"] <= found["memory"][rank]
        assert "has 3 sizes, and there are 2 devices; give one for each" in found["refused"]


SPEEDS = (0.6, 2.0)


def of_speeds(rank: int, ranks: int) -> Any:
    """The plan of a fit on ranks of these speeds."""
    return fit((rank, ranks), CNN(), {"device_speeds": SPEEDS, "model_parallel_size": 2}, {})["plan"]


@pytest.mark.ranks
def test_speeds_that_are_given_plan_offline_as_in_a_fit(tmp_path: Path) -> None:
    def offline(speeds: Any) -> Plan:
        asked: Any = {"devices": 2, "strategies": "pipeline", "model_parallel_size": 2, "device_speeds": speeds}
        return lightning_amp.plan(CNN(), batches_of(CNN(), None, 1)[0], **asked).plan

    found = run_ranks(of_speeds, 2, tmp_path)[0]
    for plan in (offline(SPEEDS), offline([0.3, 1])):
        assert (plan.rules, plan.stages) == (found.rules, found.stages)
    assert plan.stages[0].end < offline(None).stages[0].end
    assert "speeds of the ranks, by that of the fastest: 0.30, 1.00" in plan.notes
    with pytest.raises(
        PlanError, match=r"device_speeds=\[1\] has 1 speeds, and there are 2 devices; give one for each"
    ):
        offline([1])


def test_strata_follow_speeds_that_are_given_offline() -> None:
    data = profile(hic(anchors=600, strata=4), rna())
    asked: Any = {"devices": 2, "model_parallel_size": 2, "strategies": "strata"}
    equal, unlike = (lightning_amp.plan(data, **asked, device_speeds=speeds) for speeds in (None, (1, 0.5)))
    assert ends_of(unlike)[0] > ends_of(equal)[0]


@pytest.mark.full
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
