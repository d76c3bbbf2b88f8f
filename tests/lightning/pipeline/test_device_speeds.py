"""Claim: with device_speeds="measure" a rank that reaches less has fewer blocks, and trains as one process does; of a
rank under a quota the speed is that of the quota, wherever in the quota's period it begins.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_amp.lightning.strategy import hardware
from tests.lightning.pipeline.pipeline_cases import GPT, fit
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
    settings = {"schedule": "1f1b", "micro_batches": 4}
    # larger products take rank 0 longer, as if it were slow
    rows = 512 if rank == 0 else 192
    with patch.object(hardware, "SPEED_SIZE", rows), patch.object(hardware, "SPEED_S", 0.2):
        speeds = hardware.measured_speeds(torch.device("cpu"), ranks)
        slow = fit((rank, ranks), GPT(), {**settings, "device_speeds": "measure"}, {})
    return {"speeds": speeds, "slow": slow, "alike": fit((rank, ranks), GPT(), settings, {})}


@pytest.mark.full
@pytest.mark.ranks
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
