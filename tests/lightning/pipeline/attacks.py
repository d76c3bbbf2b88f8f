"""Modules that look as if they could be stages of a pipeline, and are in some way not; used by the test beside."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 4, 4
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Any:
        return h + self.linear(h).tanh()


class Net(LightningModule):
    """Plain; AdamW, whose decay also moves a parameter whose gradient is zero, but not one that has none."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([self.block() for _ in range(BLOCKS)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch["x"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


# --- exact ---


class Counts(Net):
    """The loss depends on how many steps there have been."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.calls += 1
        loss = self.loss(batch) * self.calls
        self.seen.append(len(batch["x"]))
        return loss

    def on_train_end(self) -> None:
        assert self.calls == 3, self.calls
        assert self.seen == [7, 5, 2], self.seen


class Keeps(Net):
    """Outputs in lists until the end of the epoch, as Lightning's own documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.outputs: dict[str, list[Tensor]] = defaultdict(list)
        self.scale = torch.ones(())

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.scale
        self.losses.append(loss.detach())
        # what the next step reads
        self.scale = 1 + loss.detach()
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.outputs["val"].append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val", torch.stack(self.outputs["val"]).mean())
        self.outputs.clear()

    def on_train_epoch_end(self) -> None:
        assert len(self.losses) == 3, len(self.losses)
        self.log("mean", torch.stack(self.losses).mean())


class Probes(Net):
    """Of the first two steps the head alone is trained: blocks have no gradient, and are not decayed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.detach() if self.global_step < 2 else h)


class Pair(Block):
    """A tuple with a nothing, a number and a dictionary; complex numbers in it, and keywords."""

    def forward(self, h: Tensor, *, rest: Any = None) -> Any:
        wave = None if rest is None else rest[1]["wave"]
        h = super().forward(h if wave is None else torch.view_as_real(wave).flatten(1))
        return h, (None, {"wave": torch.view_as_complex(h.unflatten(1, (WIDTH // 2, 2)))}, 3)


class Tuples(Net):
    block = Pair

    def forward(self, x: Tensor) -> Tensor:
        h, rest = self.embed(x), None
        for block in self.blocks:
            h, rest = block(h, rest=rest)
        return self.head(h + rest[1]["wave"].abs().sum(1, keepdim=True))


class Shared(Net):
    """A layer is in the first block, in the last one, and beside the blocks too; a weight is in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].linear = self.blocks[0].linear
        self.again = self.blocks[0].linear
        self.blocks[2].linear.weight = self.blocks[1].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.embed(x))
        for block in self.blocks:
            h = block(h)
        return self.head(self.again(h))


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


class Frozen(Net):
    """Blocks without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.embed(x)
            for block in list(self.blocks)[:3]:
                h = block(h)
        return self.head(self.blocks[3](h))


class Steps(Net):
    """The step is read where it is computed; the first blocks are called in another mode than the others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * (1 + self.trainer.global_step)
        for block in self.blocks:
            h = block(h + 0.1 * self.current_epoch)
        return self.head(h)


class Penalised(Net):
    """A penalty on what the last stage has, and on a parameter beside the blocks."""

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        loss += 0.1 * self.blocks[3].linear.weight.square().sum()
        return loss + 0.1 * self.embed.weight.square().sum()


class Caches(Block):
    """What depends on shapes alone may be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.table = 0, torch.empty(0)

    def forward(self, h: Tensor) -> Tensor:
        if self.length != h.shape[1]:
            self.length = h.shape[1]
            self.table = torch.linspace(0, 1, self.length, dtype=h.dtype)
        return super().forward(h + self.table)


class Cached(Net):
    block = Caches


# --- refused ---


class ReadsEarly(Net):
    def loss(self, batch: Batch) -> Tensor:
        h = first = self.embed(batch["x"])
        for n, block in enumerate(self.blocks):
            h = block(h)
            first = h if n == 0 else first
        return F.cross_entropy(self.head(h), batch["y"]) + first.square().mean()


class LogsEarly(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.embed(x))
        norm = h.norm()
        for block in list(self.blocks)[1:]:
            h = block(h)
        self.log("norm", norm)
        return self.head(h)


class Measured(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def forward(self, h: Tensor) -> Tensor:
        self.mean(h.detach().mean())
        return super().forward(h)


class MetricInside(Net):
    block = Measured


class Never(Net):
    def loss(self, batch: Batch) -> Tensor:
        return self.head(self.embed(batch["x"])).square().mean()


class Again(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(block(h))
        return self.head(h)


@dataclass
class Held:
    h: Tensor


class Wraps(Block):
    def forward(self, h: Any) -> Any:
        return Held(super().forward(h.h))


class Wrapped(Net):
    block = Wraps

    def forward(self, x: Tensor) -> Tensor:
        h: Any = Held(self.embed(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h.h)


class Branches(Block):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h if h.mean() > 0 else h * 2)


class Remembers(Block):
    """A loss of its own as an attribute, as blocks of experts have it."""

    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        self.own = h.square().mean()
        return h


class Branching(Net):
    block = Branches


class Normalises(Block):
    """Batch normalisation by hand."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward((h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-3))


class Normalised(Net):
    block = Normalises


class LossInAttributes(Net):
    block = Remembers

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + sum(block.own for block in self.blocks)


class Tracks(Block):
    """A running mean that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return super().forward(h - self.mean)


class Tracked(Net):
    block = Tracks


class Ticks(Net):
    """A counter of steps in a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.ticks += 1
        return super().training_step(batch, batch_idx)


class PenalisedInPlace(Net):
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        for parameter in self.parameters():
            loss += 0.1 * parameter.square().sum()
        return loss


class MixesTargets(Net):
    """Of the draws, the same number is in the inputs and in the loss."""

    def loss(self, batch: Batch) -> Tensor:
        share = np.random.beta(2, 2)
        return share * F.cross_entropy(self(share * batch["x"]), batch["y"])


class Reentrant(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(h)


class Gathers(Net):
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.all_gather(batch["x"]).mean()


class ClipsByHand(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Unsendable(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.way = lambda: loss
        return loss


class Meter:
    total = 0.0


class Metered(Net):
    """An object that nobody knows how to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.meter.total += float(loss)
        return loss


EXACT = (Net, Counts, Keeps, Probes, Tuples, Shared, Checkpointed, Frozen, Steps, Penalised, Cached)
REFUSED: dict[type[Net], str] = {
    ReadsEarly: "no block returns",
    LogsEarly: "logs, returns or keeps a tensor",
    MetricInside: "inside or between blocks",
    Never: "called 0 of the 4 blocks",
    Again: "block 0 of",
    Wrapped: "and ['Held']",
    Branching: "needs values that another rank computed",
    Normalised: "compute a sample from other samples",
    LossInAttributes: "outside the blocks of",
    Tracked: "changes 'blocks.",
    Ticks: "has changed the parameters or buffers ['ticks']",
    PenalisedInPlace: "a parameter that another rank holds",
    MixesTargets: "random numbers",
    Reentrant: "use_reentrant=True",
    Gathers: "self.all_gather",
    ClipsByHand: "configure_gradient_clipping",
    Metered: "'meter'",
    # by all ranks: after the last one nobody leaves a group that others wait in
    Unsendable: "attributes ['way']",
}
"""Words of what is said, by one rank at least."""


def batches() -> list[Batch]:
    """Of seven samples, of five and of two: fewer than there are micro-batches."""
    draw = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(n, 3, generator=draw, dtype=torch.float64),
            "y": torch.randint(3, (n,), generator=draw),
        }
        for n in (7, 5, 2)
    ]
