"""Claim: a cross-entropy that leaves out labels, or weighs them, trains on several data ranks as one device does on the
union of their batches, if it is the loss and nothing else is; other losses with it are warned of.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp import verify
from lightning_amp.lightning.steps.uneven_means import MeansOverLabels
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks

X = torch.randn(4, 8, 5, 6, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(0, 48, (4, 8, 5), generator=torch.Generator().manual_seed(1))
Y[torch.rand(4, 8, 5, generator=torch.Generator().manual_seed(2)) < 0.5] = -100
NO_LABEL = Y.clone()
NO_LABEL[1, 4:] = -100
"""Batches, samples, labels of a sample: the second of two ranks has no label of the second batch."""
WARNED = ("two_terms", "a_part", "batch", "changing")
WEIGHT = torch.linspace(0.1, 3, 48).double()


class Labels(Optimised, by=torch.optim.SGD, lr=0.5):
    """Takes a mean over labels in one of many ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head, self.kind = nn.Linear(6, 48), kind
        self.double()

    def loss(self, batch: Any) -> Any:
        x, y = batch
        for block in self.body:
            x = block(x)
        out: Tensor = getattr(self, f"of_{self.kind}")(self.head(x).flatten(0, -2), y.flatten())
        return {"loss": out, "more": 1} if self.kind == "weighted" else out

    def of_plain(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    def of_weighted(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, weight=WEIGHT)

    def of_smoothed(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(label_smoothing=0.1)(out, y).float().double()

    def of_likelihood(self, out: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(out.log_softmax(-1), y)[None].mean()

    def of_over_ranks(self, out: Tensor, y: Tensor) -> Tensor:
        count = self.trainer.strategy.reduce((y != -100).sum().double(), reduce_op="mean")
        return F.cross_entropy(out, y, reduction="sum") / count

    def of_all_labels(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y.clamp(min=0))

    def of_two_terms(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + self.head.weight.square().mean()

    def of_a_part(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) * 0.5

    def of_batch(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out * (1 + out.square().mean()), y)

    def of_changing(self, out: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(out, y)
        return found * 0.5 if self.global_step else found


def trained(rank: int, ranks: int, kind: str, asked: str = "S1", every: int = 1) -> tuple[dict[str, Tensor], list[str]]:
    module, strategy = Labels(kind), "auto" if ranks == 1 else AMPStrategy(strategies=asked, check_finite=True)
    data = [
        (x.chunk(ranks)[rank], y.chunk(ranks)[rank]) for x, y in zip(X, Y if kind in WARNED else NO_LABEL, strict=True)
    ]
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, accumulate_grad_batches=every, use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    told = [str(one.message) for one in said]
    told = [text for text in told if "averaged by samples" in text or "no mean over samples" in text]
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, told


def compared(tmp_path: Path, kind: str, asked: str = "S1", every: int = 1) -> tuple[list[float], list[list[str]]]:
    """The difference of each of two ranks from one device, and what each was told."""
    expected, told = trained(0, 1, kind, "S1", every)
    assert not told, "one device computes it as it is"
    ranks = run_ranks(trained, 2, tmp_path, kind, asked, every)
    return [max(float((found[name] - expected[name]).abs().max()) for name in expected) for found, _ in ranks], [
        said for _, said in ranks
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["plain", "weighted", "smoothed", "likelihood", "over_ranks", "all_labels"])
def test_a_mean_over_labels_trains_as_on_one_device(kind: str, tmp_path: Path) -> None:
    """Single precision rounds the smoothed one's loss, not its gradients' weights."""
    apart, told = compared(tmp_path, kind)
    assert max(apart) < (1e-7 if kind == "smoothed" else 1e-13)
    assert told == [[], []]


@pytest.mark.ranks
@pytest.mark.parametrize("asked", ["fsdp", "logits", "replay", "recompute", "recompute,logits", "tensor3d"])
def test_the_same_with_other_techniques(asked: str, tmp_path: Path) -> None:
    apart, told = compared(tmp_path, "plain", asked)
    assert max(apart) < 1e-13
    assert told == [[], []]


@pytest.mark.ranks
@pytest.mark.parametrize("asked", ["S1", "fsdp"])
def test_the_same_where_batches_are_accumulated(asked: str, tmp_path: Path) -> None:
    apart, told = compared(tmp_path, "plain", asked, 3)
    assert max(apart) < 1e-13
    assert told == [[], []]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("two_terms", "cross_entropy divides by the labels that count, all but"),
        ("a_part", "cross_entropy divides by the labels that count, all but"),
        ("batch", "The loss is no mean over samples"),
        ("changing", "not the result of one cross-entropy on every rank, as it was in the first step"),
    ],
)
def test_other_losses_are_warned_of_once(kind: str, expected: str, tmp_path: Path) -> None:
    apart, told = compared(tmp_path, kind)
    assert max(apart) > 1e-6
    assert [len(said) for said in told] == [1, 0]
    assert expected in told[0][0]


@pytest.mark.ranks
@pytest.mark.long
def test_verify_weighs_losses_as_the_ranks_do() -> None:
    found = verify(Labels("plain"), (X[0], Y[0]), devices=2, steps=2, precisions=["float64"], strategies="S1")
    assert found.ok, found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_what_a_mean_divides_by(dtype: torch.dtype) -> None:
    """The gradient of a label's logarithm is its weight over that number."""
    y = torch.tensor([0, 3, 7, 2, 7], dtype=dtype)
    for weight in (None, WEIGHT[:8]):
        x = torch.zeros(5, 8, dtype=torch.float64, requires_grad=True)
        means = MeansOverLabels(looks=True)
        with means.watching():
            loss = F.nll_loss(x, y, weight, ignore_index=7)
        (grad,) = torch.autograd.grad(loss, x)
        count = means.behind(loss)
        assert count is not None
        torch.testing.assert_close(
            -grad.sum() * count, torch.tensor(3.0).double() if weight is None else weight[y[[0, 1, 3]].long()].sum()
        )
        assert means.behind(loss * 2) is None
        assert means.uneven is not None
