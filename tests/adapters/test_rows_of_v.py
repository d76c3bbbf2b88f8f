"""Claim: a v with more rows than a decoder's features have anchors is planned for, and trains the same.

HiGLUE's index of anchors leaves entries of -1 with more than 10 strata, so that its v is longer than the features say.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from tests.adapters.foreign_cases import batches, differences, trained
from tests.adapters.higlue_shaped import Copy, Foreign, cells, randomise
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks

KIND = Copy(strata=3)
MORE = 12
ON_TWO = ("S1,nodes", "S1,stream,nodes", "S1,fused,nodes", "S1,S2,stream", "S1,S5", "S1,stream,strata")


class Longer(Foreign):
    """Rows of v that no feature has, in front of the others' attention and convolutions."""

    def __init__(self, kind: Copy, more: int = MORE) -> None:
        super().__init__(kind)
        self.anchors = nn.Parameter(torch.zeros(kind.anchors + more, kind.dim))
        self.double()
        randomise(self)


def fit(module: Any, loader: Any, strategy: AMPStrategy, *callbacks: Any, plugins: Any = ()) -> None:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    Trainer(
        **dict.fromkeys(quiet, False),
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,
        strategy=strategy,
        callbacks=list(callbacks),
        devices=(len(plugins) and plugins[0].world_size()) or 1,
        plugins=list(plugins),
    ).fit(module, loader)


def planned(strategy: AMPStrategy) -> Plan:
    assert strategy.plan is not None
    return strategy.plan


def on_two_ranks(rank: int, ranks: int) -> dict[str, Any]:
    expected = trained(Longer(KIND), batches(KIND), None)
    found: dict[str, Any] = {
        strategies: differences(
            trained(Longer(KIND), batches(KIND), strategies, rank=rank, ranks=ranks), expected
        )
        for strategies in ON_TWO
    }
    # a budget that only several devices have makes policy auto look for placements
    strategy = AMPStrategy(device_memory="20KiB", unfit="train")
    module = Longer(KIND)
    fit(module, DataLoader(batches(KIND), batch_size=None), strategy, plugins=[RunningRanks(rank, ranks)])
    found["auto"] = planned(strategy).strategies
    return found


@pytest.mark.exhaustive
def test_every_placement_trains_the_same_on_two_ranks(tmp_path: Any) -> None:
    for found in run_ranks(on_two_ranks, 2, tmp_path, timeout=120):
        auto = found.pop("auto")
        assert auto
        assert list(found) == list(ON_TWO)
        assert max(found.values()) <= 1e-9


@pytest.mark.long
@pytest.mark.parametrize("strategies", ["S1,stream", "S1,S4,recompute", "S1,fused,sparse"])
def test_trains_the_same_on_one_device(strategies: str) -> None:
    expected = trained(Longer(KIND), batches(KIND), None)
    assert differences(trained(Longer(KIND), batches(KIND), strategies), expected) <= 1e-9


LARGE = Copy(anchors=400, strata=12, dim=32, window=40, experiments=1)


class Steps(Longer):
    """A v that is three times as long as its features say, and little else, in single precision."""

    def __init__(self) -> None:
        super().__init__(LARGE, more=800)
        del self.critic
        self.automatic_optimization = True
        self.float()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:  # type: ignore[override]
        u = self.encoder(batch["x"].log1p())
        return -self.decoder(u, self.anchors, batch["b"], batch["l"]).log_prob(batch["x"]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def peaks(module: Any, strategy: AMPStrategy) -> tuple[int, int]:
    """Predicted and measured bytes of the second step."""
    counts = cells(LARGE, 24)
    rows = [
        {n: t[i].float() if t.is_floating_point() else t[i] for n, t in counts.items()} for i in range(24)
    ]
    monitor = StratumMemoryMonitor(plot=False)
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = Trainer(
        **dict.fromkeys(quiet, False), accelerator="cpu", max_epochs=1, strategy=strategy, callbacks=[monitor]
    )
    trainer.fit(module, loader)
    row = next(row for row in monitor.rows if row["stratum"] == "step")
    return row["predicted_bytes"], row["peak_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("strategies", [["S1", "fused"], ["S1", "stream"], None], ids=str)
def test_the_prediction_is_for_the_rows_that_v_has(
    strategies: list[str] | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = AMPStrategy(strategies=strategies)
    predicted, measured = peaks(Steps(), strategy)
    assert predicted == planned(strategy).predicted_peak_bytes
    assert any(
        "v has 1200 rows, where the decoder's features have 400 anchors" in n for n in planned(strategy).notes
    )
    assert predicted == pytest.approx(measured, rel=0.05)
