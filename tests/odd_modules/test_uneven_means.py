"""Claim: a cross-entropy that leaves out labels is warned of on several data ranks, and what the warning advises trains
as one device does.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
X, Y = (
    torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double(),
    torch.tensor([0, 1, -100, -100, 2, 1, 0, -100]),
)


class Labels(Optimised, by=torch.optim.SGD, lr=0.5):
    """Takes a mean over the labels that count: torch's, which is of a rank, or one over all ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.kind = nn.Linear(4, 3).double(), kind

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.kind == "over ranks":
            count = self.trainer.strategy.reduce((y != -100).sum().double(), reduce_op="mean")
            return F.cross_entropy(self.net(x), y, reduction="sum") / count
        return F.cross_entropy(self.net(x), y if self.kind == "of a rank" else y.clamp(min=0))


def trained(rank: int, ranks: int, kind: str) -> tuple[Tensor, list[str]]:
    module, strategy = Labels(kind), "auto" if ranks == 1 else AMPStrategy(strategies="S1")
    data = [(X.chunk(ranks)[rank], Y.chunk(ranks)[rank])] * 2 * ranks
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer_of(strategy, rank=rank, ranks=ranks).fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return module.net.weight.detach().clone(), [str(one.message) for one in said if "divides by" in str(one.message)]


@pytest.mark.parametrize(("kind", "exact"), [("of a rank", False), ("over ranks", True), ("all labels", True)])
def test_a_mean_over_labels_that_count_is_warned_of(kind: str, exact: bool, tmp_path: Path) -> None:
    expected, told = trained(0, 1, kind)
    assert not told, "one device computes it as it is"
    for rank, (found, said) in enumerate(run_ranks(trained, 2, tmp_path, kind)):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14) == exact
        assert len(said) == (not exact and rank == 0), "once, on the first rank"
        assert not said or "all but 2 of 4 (ignore_index=-100)" in said[0]
