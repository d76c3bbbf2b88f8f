"""Claim: a loss that is no mean over samples is warned of on several data ranks, whatever computes it, and a mean is
not; the passes that judge it leave nothing behind.
"""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.aggregation import MeanMetric

from lightning_amp.holding import replacing
from lightning_amp.lightning.steps import training_step
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
SEEN: list[int] = []


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Losses(Optimised, by=torch.optim.SGD, lr=0.1):
    """A small network with one of many losses, and state that every step changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 4))
        self.double()
        self.kind, self.steps, self.metric, self.updated = kind, 0, MeanMetric(), MeanMetric()
        self.own = torch.Generator().manual_seed(3)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.parts: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.steps += 1
        self.parts.append(len(x))
        SEEN.append(len(x))
        if self.kind == "mean_square with a buffer":
            self.mean += 0.1
        self.metric(x.mean())
        # changes its states in place, in every pass anew
        self.updated.update(x)
        self.log("loss", x.mean())
        if self.kind == "mean_square that writes":
            with torch.no_grad():
                self.net[0].weight.mul_(0.99)
        if self.kind.endswith("fails first"):
            self.fail(x)
        out = self.net(x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=self.own))
        if self.kind.endswith("fails last"):
            self.fail(x)
        found: Tensor = getattr(self, self.kind.replace(",", " ").split()[0])(x, y, out)
        return found

    def fail(self, x: Tensor) -> None:
        if self.global_rank == 1 and len(x) < 6:
            raise ValueError("half of a batch")

    def mean_square(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return F.mse_loss(out, x)

    def classes(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return F.cross_entropy(out, y.clamp(min=0))

    def noise(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        t = torch.randint(0, 9, (len(x), 1))
        noise = torch.randn_like(x)
        return F.mse_loss(self.net(x + t * noise), noise) * random.random()

    def masked(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return ((out - x).square().mean(1) * (y >= 0)).sum() / (y >= 0).sum()

    def imported(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return cross_entropy(out, y)

    def total(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return F.mse_loss(out, x, reduction="sum")

    def contrastive(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return F.cross_entropy(F.normalize(out) @ F.normalize(x).T, torch.arange(len(x)))

    def root(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return F.mse_loss(out, x).sqrt()

    def gathered(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        every = self.all_gather(x, sync_grads=True).reshape(-1, 4)
        return F.cross_entropy(F.normalize(out) @ F.normalize(every).T, torch.arange(len(x)))


def fit(rank: int, ranks: int, kind: str, judged: bool = True, strategies: str = "S1") -> Any:
    # labels of the second rank only are left out
    labels = torch.tensor([-100, 1, -100, 1, 3, 0] if rank else [0, 1, 2, 1, 3, 0])
    data = [(rows(10 * k + rank, 6, 4), labels) for k in range(4)]
    module = Losses(kind)
    torch.manual_seed(7 + rank)
    random.seed(7)
    SEEN.clear()
    instead = {} if judged else {"warn_unless_mean": lambda *_, **__: (False, "")}
    with warnings.catch_warnings(record=True) as said, replacing(training_step, **instead):
        warnings.simplefilter("always")
        trainer_of(AMPStrategy(strategies=strategies), rank=rank, ranks=ranks).fit(
            module,
            DataLoader(data, batch_size=None),  # type: ignore[arg-type]
        )
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    left = [
        module.steps,
        module.parts,
        list(SEEN),
        module.metric.compute().item(),
        module.updated.compute().item(),
        torch.rand(1).item(),
    ]
    left += [random.random(), module.own.get_state().sum().item()]
    texts = [str(one.message) for one in said]
    told = [text for text in texts if "averaged by samples" in text or "no mean over samples" in text]
    return state, left, told


@pytest.mark.parametrize("kind", ["masked", "imported", "total", "contrastive", "root"])
def test_a_loss_that_is_no_mean_over_samples_is_warned_of_once(kind: str, tmp_path: Path) -> None:
    (_, _, first), (_, _, second) = run_ranks(fit, 2, tmp_path, kind)
    assert len(first) == 1
    assert not second
    expected = "cross_entropy divides by the labels that count, all but 2 of 6 (ignore_index=-100)"
    assert (expected if kind == "imported" else "no mean over samples") in first[0]


@pytest.mark.parametrize(
    "kind", ["mean_square", "classes", "noise", "mean_square with a buffer", "gathered", "mean_square that writes"]
)
def test_a_mean_is_not_and_nothing_is_left_behind(kind: str, tmp_path: Path) -> None:
    judged = run_ranks(fit, 2, tmp_path, kind)
    plain = run_ranks(fit, 2, tmp_path, kind, False)
    for (state, left, told), (other, rest, _) in zip(judged, plain, strict=True):
        assert not told
        assert left == rest
        torch.testing.assert_close(state, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["noise", "mean_square, whose half fails first", "mean_square, whose half fails last"])
def test_the_same_under_fsdp_also_where_a_pass_fails_on_one_rank(kind: str, tmp_path: Path) -> None:
    """Attributes had been left behind, and the other rank had waited for ever."""
    judged = run_ranks(fit, 2, tmp_path, kind, True, "fsdp")
    plain = run_ranks(fit, 2, tmp_path, kind, False, "fsdp")
    for (state, left, told), (other, rest, _) in zip(judged, plain, strict=True):
        assert not told
        assert left == rest
        torch.testing.assert_close(state, other, rtol=0, atol=0)
