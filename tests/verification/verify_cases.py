"""Small modules for test_verify.py, clean ones and one for each thing that breaks equivalence; how to verify them."""

import gc
import json
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp.verification.compare import Precision, Report
from lightning_amp.verification.result import Verification
from lightning_amp.verification.training_run import Training, train_one, train_rank
from lightning_amp.verification.verify import subject_of, verification_of
from tests.optimised import Optimised
from tests.paths import ROOT
from tests.ranks import run_ranks

EXAMPLES = str(ROOT / "examples" / "any_module")
Cells = dict[str, Tensor]


def cells(n: int, *, seed: int = 0) -> Cells:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator)
    mask = torch.rand(n, 2, generator=generator) < torch.linspace(0.2, 0.9, n)[:, None]
    return {"x": x, "y": x @ torch.ones(5, 2) + 1, "mask": mask}


class Clean(Optimised, by=torch.optim.Adam, lr=0.01):
    """Batch normalisation, an adaptive optimiser, a mean over cells."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.middle = middle or nn.Identity()
        self.head = nn.Linear(8, 2)

    def loss(self, batch: Any) -> Tensor:
        return (self.head(self.middle(self.encoder(batch["x"]))) - batch["y"]).square().mean()


class Inline(Optimised, by=torch.optim.SGD, lr=0.1):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]


class EdgesDrawn(Clean):
    """Draws numbers that are not those of cells: the same on every rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + (torch.randn(11, 2) @ self.head.weight).square().mean()


class Amplified(Clean):
    """Makes something of a gradient that is rounding: that of the bias in front of batch normalisation."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-11)


class Adversarial(Clean):
    """Manual optimisation with two optimisers; clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        u = self.encoder(batch["x"])
        for optimizer, loss in zip(
            self.optimizers(),  # type: ignore[arg-type]
            (lambda: F.softplus(self.critic(u.detach())).mean(), lambda: self.loss(batch) - self.critic(u).mean()),
            strict=True,
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        rest = [*self.encoder.parameters(), *self.head.parameters()]
        return torch.optim.RMSprop(self.critic.parameters()), torch.optim.SGD(rest, lr=0.1)


class Samples(Clean):
    """Draws a latent in the training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        u = self.encoder(batch["x"])
        return (self.head(u + torch.randn_like(u)) - batch["y"]).square().mean()


class Masked(Clean):
    """A mean over the entries of a mask."""

    def loss(self, batch: Any) -> Tensor:
        error = (self.head(self.middle(self.encoder(batch["x"]))) - batch["y"]).square()
        return (error * batch["mask"]).sum() / batch["mask"].sum()


class Summed(Clean):
    """A sum over cells."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch["x"])


class Centred(nn.Module):
    """Batch statistics of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Modalities(Clean):
    """The sum of two means, over different numbers of cells."""

    def loss(self, batch: Any) -> Tensor:
        first, second = (Clean.loss(self, part) for part in batch.values())
        return first + second


class Centre(Clean):
    """A buffer of the rank's own cells that no gradient sees."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.centre.lerp_(batch["x"].mean(0), 0.1)
        return self.loss(batch)


class RunningScale(nn.Module):
    """Divides by a running scale, and subtracts a running mean, of the rank's own cells.

    `late` takes what the steps before have left, so that the first step is equal.
    """

    mean: Tensor
    scale: Tensor
    started: Tensor

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("started", torch.zeros(1, dtype=torch.bool))

    def totals(self, x: Tensor) -> Tensor:
        """Sums of values and of their sizes, and the number of cells."""
        return torch.cat([x.sum(0), x.abs().sum(0), x.new_tensor([len(x)])])

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone(), self.scale.clone()
        if self.training:
            totals = self.totals(x.detach())
            mean, scale = (totals[:-1] / totals[-1]).chunk(2)
            momentum = torch.where(self.started, 0.1, 1.0)
            self.mean.lerp_(mean, momentum.to(x.dtype))
            self.scale.lerp_(scale, momentum.to(x.dtype))
            self.started.fill_(True)
        mean, scale = before if self.late else (self.mean, self.scale)
        return (x - mean) / scale


class SharedScale(RunningScale):
    """The same over the cells of all ranks, as is advised."""

    def totals(self, x: Tensor) -> Tensor:
        totals = super().totals(x)
        if dist.is_initialized():
            dist.all_reduce(totals)
        return totals


class Scaled(Clean):
    """Scales what the encoder reads, as HiGLUE's newest encoders do."""

    def __init__(self, scaler: nn.Module) -> None:
        super().__init__()
        self.encoder.insert(0, scaler)


class ByRank(Clean):
    """What a rank computes depends on which one it is, and on numpy's generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + self.global_rank + float(np.random.rand()))


class MaskedOverRanks(Clean):
    """Masked as verify advises."""

    def loss(self, batch: Any) -> Tensor:
        error = (self.head(self.middle(self.encoder(batch["x"]))) - batch["y"]).square()
        entries = self.trainer.strategy.reduce(batch["mask"].sum(), reduce_op="mean")
        return (error * batch["mask"]).sum() / entries


class Attends(Clean):
    """Attention with dropout, one operator of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def loss(self, batch: Any) -> Tensor:
        u = self.encoder(batch["x"])[:, None]
        return (self.head(self.attention(u, u, u, need_weights=False)[0][:, 0]) - batch["y"]).square().mean()


class Stages(Optimised, by=torch.optim.SGD, lr=0.1):
    """A list of blocks, and parameters before and after it, of which one is tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch["x"])
        for block in self.blocks:
            x = block(x)
        return (self.last(x) - batch["x"]).square().mean()


class Wide(Optimised, by=torch.optim.SGD, lr=0.1):
    """Most bytes are those of activations, at the end of the forward pass, when the gradients are not there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())))

    def loss(self, batch: Any) -> Tensor:
        return self.layers(batch).square().mean()  # type: ignore[no-any-return]


class Late(Clean):
    """Wrong from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Masked.loss(self, batch) if batch_idx else self.loss(batch)  # type: ignore[arg-type]


class NotFinite(Clean):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / 0


class RaisesOnRank(Clean):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.world_size > 1:
            raise ArithmeticError("on purpose")
        return self.loss(batch)


def waits_for_nobody(rank: int, ranks: int, folder: Path) -> None:
    """Rank 1 does not return."""
    if rank == 1:
        threading.Event().wait()


def collects(rank: int, ranks: int, folder: Path) -> None:
    """Garbage of whatever this process has."""
    gc.collect()


def ends(rank: int, ranks: int, folder: Path) -> None:
    """Rank 1 ends without an answer, as when memory ends."""
    if rank == 1:
        os._exit(9)


Case = tuple[LightningModule, Any, dict[str, Any]]
"""A module, its data and options of AMPStrategy."""


def verified(
    folder: Path, cases: dict[str, Case], *, precisions: tuple[Precision, ...] = ("float64",)
) -> dict[str, Verification]:
    """Verify some modules over two steps, with the ranks of all of them in the same two processes of the test run."""
    runs = {}
    for name, (module, data, options) in cases.items():
        (folder / name).mkdir()
        (folder / name / "subject.pt").write_bytes(subject_of(module, data, 2))
        with warnings.catch_warnings(action="ignore"):
            for precision in precisions:
                train_one(folder / name, precision, 2)
        runs[name] = Training(steps=2, precisions=precisions, options=options, timeout=60)
    found = run_ranks(train_ranks, 2, folder, folder, runs)
    results = {}
    for name, (module, *_) in cases.items():
        results[name] = result = verification_of(type(module).__name__, [reports[name] for reports in found])
        assert all(len(line) <= 80 for line in str(result).splitlines())
        assert json.loads(json.dumps(result.to_dict()))["ok"] is result.ok
    return results


def train_ranks(rank: int, ranks: int, folder: Path, runs: dict[str, Training]) -> dict[str, list[Report]]:
    # some modules are those of the examples
    sys.path.append(EXAMPLES)
    try:
        return {
            name: [train_rank(rank, ranks, folder / name, precision, run) for precision in run.precisions]
            for name, run in runs.items()
        }
    finally:
        sys.path.remove(EXAMPLES)
