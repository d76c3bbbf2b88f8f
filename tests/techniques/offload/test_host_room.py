"""Claim: without `host_memory=` a fit takes no more host memory than is free for a rank, and plans within it."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_amp import AMPStrategy
from lightning_amp.techniques.host_memory.limit import free_bytes
from lightning_amp.techniques.offload.install import moves_of
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.offload.test_fit import Blocks
from tests.techniques.replay import models
from tests.techniques.replay.models import MODELS, fit


class Limits(Meter):
    """What a rank may have on the host, and what its node has free."""

    limit: int | None = None
    available = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        moves = moves_of(module)
        assert moves is not None
        self.limit, self.available = moves.pool.limit, psutil.virtual_memory().available


@pytest.mark.ranks
def test_ranks_of_a_node_share_its_free_memory(tmp_path: Path) -> None:
    (limit, available), (other, _) = run_ranks(limits, 2, tmp_path)
    # decided once: what each of them reads differs
    assert limit == other
    assert 0.3 * available < limit < 0.5 * available


def limits(rank: int, ranks: int) -> tuple[int | None, int]:
    MODELS["blocks"] = (Blocks, lambda n: torch.randn(256 * n, 16))
    models.Meter = Limits  # type: ignore[misc]
    options: Any = {"devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    _, meter, _ = fit("blocks", AMPStrategy(strategies="S1,offload"), steps=2, **options)
    assert isinstance(meter, Limits)
    return meter.limit, meter.available


def test_a_launcher_may_know_of_more_ranks_than_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (free_bytes(), free_bytes(2)) == (800, 400)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (free_bytes(), free_bytes(2)) == (200, 200)
