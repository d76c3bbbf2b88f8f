"""Modules of a list of blocks that look as if they could be stages of a pipeline, and cannot."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.odd_modules.collection.stages import WIDTH, Batch, Block, Net, of_stages


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


class Remembers(Block):
    """A loss of its own as an attribute, as blocks of experts have it."""

    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        self.own = h.square().mean()
        return h


class Normalises(Block):
    """Batch normalisation by hand."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward((h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-3))


class Normalised(Net):
    block = Normalises

    # a bias before it has a gradient of zeros but for rounding, which Adam would divide by something as small
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


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
    """A counter of steps in a buffer of integers, which only the last rank's step reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.ticks += 1
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


class Masked(Net):
    """A mean over the samples that are not masked: of the first ones fewer."""

    def loss(self, batch: Batch) -> Tensor:
        y = batch["y"].masked_fill(torch.arange(len(batch["y"])) == 0, -100)
        return F.cross_entropy(self(batch["x"]), y)


class Summed(Net):
    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"], reduction="sum")

    # Adam would divide gradients that are zero but for rounding by something as small
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Contrastive(Summed):
    """Every sample among the others of the batch."""

    def loss(self, batch: Batch) -> Tensor:
        h = self(batch["x"])
        return F.cross_entropy(h @ h.T, torch.arange(len(h)))


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda *_: None)


class HookedGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: grad / 2)


class ByNormOfAll(torch.optim.SGD):
    """Clips by itself, by the norm of all that it has."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads).clone()
        for grad in grads:
            grad /= norm
        super().step()
        return loss


class Coupled(Net):
    def configure_optimizers(self) -> Any:
        return ByNormOfAll(self.parameters(), lr=1e-2)


class FromTheFirst(Block):
    """Of every sample the difference from the first one."""

    def forward(self, h: Tensor) -> Any:
        return super().forward(h - h[:1])


class Referred(Net):
    block = FromTheFirst


class Rectifies(Block):
    """Writes into what it is given."""

    def forward(self, h: Tensor) -> Any:
        return super().forward(h.relu_())


class Overwritten(Net):
    """What the first block has written into is read after the last one."""

    block = Rectifies

    def forward(self, x: Tensor) -> Tensor:
        h = first = torch.cat([x, x[:, :1]], 1)
        for block in self.blocks:
            h = block(h)
        return self.head(h + first)


class Doubles(Block):
    """Returns one tensor twice, and writes into one of the two that it is given."""

    def forward(self, h: Any) -> Any:
        if isinstance(h, tuple):
            h[0].mul_(2)
            h = h[0] + h[1]
        h = super().forward(h)
        return h, h


class Doubled(Net):
    block = Doubles

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h[0])


class Scales(Net):
    """Its batch, in place."""

    def loss(self, batch: Batch) -> Tensor:
        batch["x"].div_(2)
        return super().loss(batch)


class NoList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = Block().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


class CallsTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[1])


class OptimisesByHand(Net):
    """As Lightning's documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


NO_MEAN = {"pipeline": "it is no mean over samples"}
MIXED = {"pipeline": "compute a sample from other samples"}
NO_STAGES = {
    "a loss that leaves samples out": of_stages(Masked, NO_MEAN, by_rows=True),
    "a sum over samples": of_stages(Summed, NO_MEAN, by_rows=True),
    "every sample among the others": of_stages(Contrastive, NO_MEAN, by_rows=True),
    "a hook on a block": of_stages(Hooked, {"pipeline": "forward_hooks"}),
    "hooks on parameters": of_stages(HookedGradient, {"fsdp": "which has hooks", "sequence": "has hooks",
        "tensor3d": "has hooks", "pipeline": "hooks on its gradient"}),
    "one block and no list": of_stages(NoList),
    "a block that is in the list twice": of_stages(CallsTwice, {"pipeline": "a module in it twice"}),
    "a log between blocks": of_stages(LogsEarly, {"pipeline": "logs, returns or keeps a tensor"}),
    "a metric in a block": of_stages(MetricInside, {"chunk": "its forward cannot run on fake tensors",
        "pipeline": "inside or between blocks"}),
    "an object between blocks": of_stages(Wrapped, {"chunk": "it is called with a 'Held', which cannot be copied",
        "pipeline": "and .'Held'."}),
    "batch normalisation by hand": of_stages(Normalised, MIXED, by_rows=True),
    "differences from the first sample": of_stages(Referred, MIXED, by_rows=True),
    "a batch that is scaled in place": of_stages(Scales, {"pipeline": "writes in place into a tensor of its batch"}),
    "one tensor twice between blocks": of_stages(Doubled, {"fsdp": "a block writes in place",
        "recompute": "it changes its argument 0 in place",
        "chunk": "'Doubles' in chunks does not compute what its own forward does",
        "pipeline": "several tensors in one memory"}),
    "blocks that rectify in place": of_stages(Overwritten, {"fsdp": "a block writes in place",
        "recompute": "it changes its argument 0 in place",
        "pipeline": "writes in place into an argument"}),
    "an optimiser that clips by itself": of_stages(Coupled, {
        **dict.fromkeys(("fsdp", "tensor3d"), "its update mixes the elements"),
        "pipeline": "its step depends on all parameters", "early_update": "may read several gradients at once",
        "host_optimizer": "may read several gradients at once"}),
    "losses in attributes of blocks": of_stages(LossInAttributes, {"chunk": "changes the attribute 'own'",
        "pipeline": "outside the blocks of"}),
    "a running mean that no checkpoint has": of_stages(Tracked, {"chunk": "replaces its parameter or buffer 'mean'",
        "pipeline": "changes 'blocks."}, by_rows=True),
    "a counter of steps in a buffer": of_stages(Ticks, {
        "pipeline": "has changed the parameters or buffers .'ticks'."}),
    "one draw for inputs and loss": of_stages(MixesTargets, {"pipeline": "random numbers"}, by_rows=True),
    "blocks under a reentrant checkpoint": of_stages(Reentrant, {
        "sequence": "'CheckpointFunction' in", "tensor3d": "use_reentrant=False", "pipeline": "use_reentrant=True"}),
    "a collective in the loss": of_stages(Gathers, {
        "sequence": "'_AllGather' in", "pipeline": "self.all_gather"}, by_rows=True),
    "clipping by hand": of_stages(ClipsByHand, {"tensor3d": "'configure_gradient_clipping' calls",
        "pipeline": "configure_gradient_clipping", "early_update": "configure_gradient_clipping of the module"}),
    "an object that sums up": of_stages(Metered, {"pipeline": "'meter'"}),
    "optimisation by hand": of_stages(OptimisesByHand, {"pipeline": "it has automatic_optimization=False",
        "early_update": "manual optimization"}),
    # of all ranks: after the last one nobody leaves a group that others wait in
    "an attribute that cannot be sent": of_stages(Unsendable, {"pipeline": "attributes .'way'."}),
}  # fmt: skip
