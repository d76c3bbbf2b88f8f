"""Modules and ways to train that fsdp refuses, and what it says on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from lightning_amp import AMPStrategy
from tests.lightning.strategy.fsdp_features import Blocks, Penalised, ReadsElsewhere, loader, trainer_of
from tests.lightning.strategy.strategy_cases import EVEN, Batch, Case


class Skips(Blocks):
    """A rank leaves a block out."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = 1 if self.trainer.global_rank == 1 else None
        for k, block in enumerate(self.blocks):
            x = x if k == skipped else x + block(x)
        return x


class SkipsBackward(Blocks):
    """A rank runs a block, whose output its loss does not read."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for k, block in enumerate(self.blocks):
            made = block(x)
            x = x + (made.detach() if k == 1 and self.trainer.global_rank == 1 else made)
        return x


class Stray(Blocks):
    """A backward pass of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


class StrayRoot(Stray):
    """The same, with parameters of no block alone."""

    def loss(self, batch: Batch) -> Tensor:
        return (self.last(self.first(batch["rna"]["x"])) - batch["rna"]["y"]).square().mean()


class Clamped(Blocks):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.last.bias[0] += 1
        return super().training_step(batch, batch_idx)


class Replaced(Blocks):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.last.bias.data = self.last.bias.data + 1
        return super().training_step(batch, batch_idx)


class Renormed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.ModuleList([nn.Embedding(4, 3, max_norm=0.1)]).double()

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.idle[0](torch.arange(4)).sum()


class Old(Blocks):
    """Keeps a function that reads a parameter by itself."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.blocks[1][0].weight
        self.low_rank = lambda x: x @ weight.T @ weight

    def through(self, x: Tensor) -> Tensor:
        return self.low_rank(super().through(x))


class Sparse(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3, sparse=True)


class Complex(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex128))


class Averaged(Blocks):
    """Assigns data between steps, as averaging teachers do."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.last.bias.data = self.last.bias.data * 0.5


class Quasinewton(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Hooked(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 2)


class Mixed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][0].float()


REFUSED: dict[str, tuple[type[Blocks], dict[str, Any], str]] = {
    "a block that a rank skips": (Skips, {}, "rank 1 gathers the parameters of 'blocks.2'"),
    "gradients that a rank has not": (SkipsBackward, {}, "all ranks use the same blocks in the same order"),
    "parameters read elsewhere": (ReadsElsewhere, {"given": True}, "code outside of it has read some"),
    "a backward pass of one's own": (Stray, {}, "call self.manual_backward(loss)"),
    "one of the root's parameters alone": (StrayRoot, {}, "call self.manual_backward(loss)"),
    "a parameter changed in a step": (Clamped, {}, "'last.bias' is gathered for a training step"),
    "a parameter changed unseen": (Replaced, {}, "is gathered for a training step"),
    "a parameter changed in a block": (Renormed, {}, "'weight' is gathered for a training step, or while its block"),
    "a parameter by an old reference": (Old, {}, "which has no values any more"),
    "a sparse gradient": (Sparse, {}, "['words'] have sparse gradients"),
    "a complex parameter": (Complex, {}, "which is complex"),
    "data that are assigned": (Averaged, {}, "assigned to the .data of 'bias'"),
    "a penalty on weights": (Penalised, {"given": True}, "the loss is computed from a rank's rows"),
    "an optimiser that mixes entries": (Quasinewton, {}, "parameters that fsdp splits over ranks"),
    "hooks on a parameter": (Hooked, {}, "'first.weight' over the ranks, which has hooks"),
    "two types in a block": (Mixed, {}, "have the types ['float32', 'float64']"),
    "averaged weights": (
        Blocks,
        {"callbacks": [lambda: StochasticWeightAveraging(swa_lrs=0.1)]},
        "averages whole parameters, and fsdp has sharded",
    ),
}


def refusals(rank: int) -> dict[str, tuple[str, bool]]:
    """What is refused, without an end that one rank waits for; and whether the module is a plain one again.

    With all its values where nothing was trained, else with the rank's rows.
    """
    found = {}
    fitted = trainer_of(rank, 2)
    fitted.fit(Blocks(), loader(Case(Blocks, cells=EVEN).batches(rank)))
    # of a module that reads no block's parameters elsewhere; a plan of one that does has no such blocks
    plan = fitted.strategy.plan  # type: ignore[attr-defined]
    for name, (kind, options, _) in REFUSED.items():
        module, data = kind(), loader(Case(kind, cells=EVEN).batches(rank))
        callbacks = [make() for make in options.get("callbacks", ())]
        strategy = AMPStrategy(plan=plan) if options.get("given") else None
        try:
            trainer_of(rank, 2, strategy, callbacks=callbacks).fit(module, data)
            told = ""
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        plain = all(type(p) is nn.Parameter for p in module.parameters())
        plain &= type(module) is kind and "training_step" not in vars(module)
        # 5 rows on 2 ranks are 3 and 2; what an ended run has of the other rank's is nan
        rows = module.first.weight[:3] if rank == 0 else module.first.weight[3:]
        kept = rows if told.startswith("ModelError") else torch.cat([p.flatten() for p in module.parameters()])
        found[name] = told, plain and bool(kept.isfinite().all())
        dist.barrier()
    return found
