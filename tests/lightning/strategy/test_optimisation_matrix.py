"""Claim: under the Trainer combinations of S2 to S5 train as one process, by automatic and manual optimisation.

Three ranks on the model axis, which divide nothing of the sizes; double precision. An array that has every pair of
choices, before a release all combinations. Three steps each: the loss of every
step and all parameters, whole again after the run, to 1e-10. test_exactness_matrix.py has the gradients, and the other
numbers of ranks and forms of the decoder.
"""

from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.each import all_pairs
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.parallel.sharded_cases import Results, decoder, differences
from tests.parallel.test_exactness_matrix import BEFORE_A_RELEASE, UNEVEN
from tests.ranks import run_ranks

RANKS, STEPS, CELLS = 3, 3, 5
N_FEATURES = sum(map(len, UNEVEN.nodes()))
QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
Batch = dict[str, Tensor]
Row = tuple[type[LightningModule], tuple[str, ...], str, str]
"""How it is optimised, what shares the decoder over ranks, and S3 and S4 or ""."""


class Automatic(LightningModule):
    """A wide encoder and a stratified decoder under one optimiser."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encoder = nn.Linear(N_FEATURES, UNEVEN.dim).double()
        self.v = nn.Parameter(torch.randn(UNEVEN.anchors, UNEVEN.dim, dtype=torch.float64))
        self.decoder = decoder(UNEVEN)
        self.losses: list[Tensor] = []

    def loss(self, batch: Batch) -> Tensor:
        arguments = {name: batch[name] for name in ("batch", "library", "x")}
        loss: Tensor = self.decoder(self.encoder(batch["x"].log1p()), self.v, **arguments)
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=2e-3)


class Manual(Automatic):
    """Two optimisers stepped by hand, of which one has what S2 shards; a second backward adds to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.manual_backward(0.5 * self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        inside = list(self.decoder.parameters())
        return [torch.optim.RMSprop([*self.encoder.parameters(), self.v]), torch.optim.RMSprop(inside)]


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(6)
    found = []
    for _ in range(STEPS):
        rate = torch.full((CELLS, N_FEATURES), 0.7, dtype=torch.float64)
        x = torch.poisson(rate, generator=generator)
        found.append({"x": x, "library": x.sum(1, keepdim=True) + 1, "batch": torch.arange(CELLS) % 2})
    return found


def fit(kind: type[Automatic], strategy: Any, **options: Any) -> Results:
    module = kind()
    trainer = Trainer(
        **QUIET, accelerator="cpu", max_epochs=1, strategy=strategy, use_distributed_sampler=False, **options
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    losses = {f"loss {i}": loss for i, loss in enumerate(module.losses)}
    return losses | {name: value.clone() for name, value in module.state_dict().items()}


ROWS: list[Row] = list(product((Automatic, Manual), (("S2",), ("S5",), ("S2", "S5")), ("", "S3"), ("", "S4")))


def compare_all(rank: int, world_size: int, rows: list[Row]) -> tuple[int, list[str]]:
    """How many combinations this rank has compared, and what differs."""
    expected = {kind: fit(kind, "auto", devices=1) for kind in (Automatic, Manual)}
    compared, wrong = 0, []
    for kind, placement, *others in rows:
        strategies = tuple(sorted({"S1", *placement, *others} - {""}))
        strategy = AMPStrategy(strategies=list(strategies))
        found = fit(kind, strategy, devices=world_size, plugins=[RunningRanks(rank, world_size)])
        assert strategy.plan is not None, "there is a plan after a fit"
        compared += strategy.plan.strategies == strategies and strategy.plan.mesh.model == world_size
        wrong += [
            f"{kind.__name__} {'+'.join(strategies)}: {line}" for line in differences(found, expected[kind])
        ]
    return compared, wrong


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("which", [all_pairs, pytest.param(list, marks=BEFORE_A_RELEASE)])
def test_combinations_under_both_kinds_of_optimisation(which, tmp_path) -> None:
    rows = which(ROWS)
    results = run_ranks(compare_all, RANKS, tmp_path, rows, timeout=280)
    assert all(compared == len(rows) >= 6 for compared, _ in results), "every plan was carried out"
    wrong = [f"rank {rank}, {line}" for rank, (_, lines) in enumerate(results) for line in lines]
    assert not wrong, "\n".join(wrong)


def test_training_moves_what_is_compared() -> None:
    start = Automatic().state_dict()
    for kind in (Automatic, Manual):
        end = fit(kind, "auto", devices=1)
        moved = [name for name, value in start.items() if not torch.equal(value, end[name])]
        assert {"encoder.weight", "v", "decoder.strata.1.key.qk.weight", "decoder.strata.2.scale"} <= set(
            moved
        )
