"""Claim: a v with more rows than a decoder's features have anchors is planned for.

HiGLUE's index of anchors leaves entries of -1 with more than 10 strata, so that its v is longer than the features say.
"""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.adapters.higlue_shaped import Copy, Foreign, cells
from tests.lightning.strategy.strategy_cases import trainer_of

LARGE = Copy(anchors=400, more_rows=800, strata=12, dim=32, window=40, experiments=1)


class Steps(Foreign):
    """A v that is three times as long as its features say, and little else, in single precision."""

    def __init__(self) -> None:
        super().__init__(LARGE)
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
    rows = [{n: t[i].float() if t.is_floating_point() else t[i] for n, t in counts.items()} for i in range(24)]
    monitor = StratumMemoryMonitor(plot=False)
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    trainer_of(strategy, callbacks=[monitor]).fit(module, loader)
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
    assert strategy.plan is not None
    assert predicted == strategy.plan.predicted_peak_bytes
    assert any("v has 1200 rows, where the decoder's features have 400 anchors" in n for n in strategy.plan.notes)
    assert predicted == pytest.approx(measured, rel=0.05)
