"""Modules of a list of blocks that are unusual, and can be stages of a pipeline; no_stages.py has those that cannot."""

from collections import defaultdict
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.odd_modules.collection.row import Row

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

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"samples of {k}": float(n) for k, n in enumerate(self.seen)})


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


class PenalisedInPlace(Net):
    """A penalty on all weights: the last stage's rank holds those of all blocks."""

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        for parameter in self.parameters():
            loss += 0.1 * parameter.square().sum()
        return loss


class ReadsAfter(Net):
    """What follows the blocks calls a layer of the first one, once with gradients, once without."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x)
        for block in self.blocks:
            h = block(h)
        gate = self.blocks[0].linear(first).sigmoid()
        return self.head(h * gate * (1 + self.blocks[1].linear.weight.detach().norm()))


class Routes(nn.Module):
    """Experts: the values decide which rows each of them gets."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        share, chosen = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for i in chosen.unique().tolist():
            rows = (chosen == i).nonzero().flatten()
            out.index_add_(0, rows, self.experts[i](h[rows]).tanh() * share[rows, None])
        return h + out


class Experts(Net):
    block = Routes


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


class Takes(Net):
    """Takes its targets out of its batch, and has no number of it; the loss has a dimension."""

    def training_step(self, batch: Batch) -> Any:  # type: ignore[override]
        y = batch.pop("y")
        self.log("count", float(len(batch)))
        return F.cross_entropy(self(batch["x"]), y)[None]


class Resets(Net):
    """Every second step logs the mean since the last time, and begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            self.mean.reset()
        self.mean.update(loss.detach())
        if (batch_idx + 1) % 2 == 0:
            self.log("two", self.mean.compute())
            self.mean.reset()
            self.mean.update(1.0)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())


class Ignores(Net):
    """Writes what it does not learn into its labels, after it has read them; a hook reads them too."""

    def loss(self, batch: Batch) -> Tensor:
        y = batch["y"]
        share = (y == 1).double().mean()
        y[y == 2] = -100
        return F.cross_entropy(self(batch["x"]), y, reduction="none").mean() + share

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.log("learned", (batch["y"] >= 0).double().mean())


def batches() -> list[Batch]:
    """Of seven samples, of five and of two: fewer than there are micro-batches."""
    draw = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(n, 3, generator=draw, dtype=torch.float64), "y": torch.randint(3, (n,), generator=draw)}
        for n in (7, 5, 2)
    ]


def of_stages(kind: type[Net], says: dict[str, str] | None = None, *, by_rows: bool = False) -> Row:
    return Row(kind, batches, says or {}, by_rows)


STAGES = {
    "a list of blocks": of_stages(Net),
    "labels that are written to": of_stages(Ignores),
    "a metric that is reset": of_stages(Resets),
    "a step that counts its calls": of_stages(Counts),
    "a batch without a number that loses its labels": of_stages(Takes),
    "outputs that are kept until the end of the epoch": of_stages(Keeps, by_rows=True),
    "blocks that learn from the third step on": of_stages(Probes),
    "tuples, dictionaries and complex numbers between blocks": of_stages(Tuples),
    "a layer in two blocks and beside them": of_stages(Shared, {"fsdp": "torch's fully_shard refused"}),
    "blocks under a checkpoint": of_stages(Checkpointed, {"sequence": "'untyped_storage' in"}),
    "blocks without gradients": of_stages(Frozen),
    "a step that reads the number of steps": of_stages(Steps),
    "a penalty on the last block's weight": of_stages(Penalised),
    "a penalty on all weights": of_stages(PenalisedInPlace),
    "a layer of the first block called after the last one": of_stages(ReadsAfter),
    "experts in blocks": of_stages(
        Experts,
        {
            "chunk": "its forward cannot run on fake tensors",
            "fsdp": "under fsdp all ranks use the same blocks",
            "sequence": "'_unique2' in",
        },
    ),
    "a table that depends on the shape": of_stages(Cached, {"chunk": "changes the attribute 'length'"}),
}
