"""What fsdp must do beside plain steps: ways to optimise, modules that are hard to split, checkpoints, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.costs.model_shape import profile_of_module
from lightning_amp.installing.describe_module import describe
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.techniques.fsdp.row import FullyShard
from tests.lightning.strategy import strategy_cases
from tests.lightning.strategy.strategy_cases import AGAINST_UNION, EVEN, Batch, Case, Regression

Found = dict[str, Any]


class Blocks(Regression):
    """Blocks of a list, a weight that two layers share, a parameter without a dimension, and a block of no use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 3)
        self.last.weight = nn.Parameter(self.last.weight.detach())
        self.back = nn.Linear(3, 5, bias=False)
        self.back.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(1, 1))
        self.idle = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("steps", torch.zeros(()))
        self.double()

    def on_after_backward(self) -> None:
        """Nothing."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, batch: Batch) -> Tensor:
        x = self.through(batch["rna"]["x"])
        x = self.scale * self.back(self.last(x)).sum(1, keepdim=True) + self.shift
        return (x - batch["rna"]["y"]).square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        # as Lightning itself does where the backend is not gloo
        with torch.inference_mode():
            loss = self.loss(batch)
        self.log("val_loss", loss.clone(), sync_dist=True, batch_size=1)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.through(batch["rna"]["x"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class SharedBlock(Blocks):
    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.blocks[0](x)
        return x


class Frozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.first.weight.requires_grad_(False)


class Several(Blocks):
    """Manual optimisation: two updates in a step, the second of what the first has left, and sums of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        one, other = self.optimizers()
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch) * 2)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.last.bias.grad = self.last.bias.grad * 0.5
        one.step()
        # of what the update has left, and nothing but it has come in between
        self.manual_backward(self.loss(batch))
        one.step()
        self.toggle_optimizer(other)
        other.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(other, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        other.step()
        self.untoggle_optimizer(other)

    def configure_optimizers(self) -> Any:
        inner = [*self.blocks.parameters(), self.scale]
        outer = [*self.first.parameters(), *self.last.parameters(), self.shift]
        return [torch.optim.SGD(outer, lr=0.02, momentum=0.5), torch.optim.Adam(inner, lr=0.01)]


class ReadsElsewhere(Blocks):
    """A block's weight is read outside of its forward."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + (self.blocks[0][0].weight * torch.ones(7, 5, dtype=torch.float64)).sum()


class Penalised(Blocks):
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 1e-3 * sum(p.square().sum() for p in self.blocks.parameters())


class InParts(Blocks):
    """The parts of a block are called one by one, and the block is not."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            made = x
            for part in block:
                made = part(made)
            x = x + made
        return x


class ByForward(Blocks):
    """`forward` of a block is called, which runs no hooks."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block.forward(x)
        return x


BY_NORM, BY_VALUE = ({"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"})
MODULES: dict[type[Blocks], dict[str, Any]] = {
    Blocks: {}, SharedBlock: BY_NORM, Frozen: BY_VALUE, Several: {}, Penalised: BY_NORM, InParts: BY_VALUE,
    ByForward: {},
}  # fmt: skip
"""With options of the Trainer."""
WAYS = {name: AGAINST_UNION[name] for name in ("normalised", "unfrozen", "adversarial_accumulating")}
WAYS |= {kind.__name__: Case(kind, trainer=options) for kind, options in MODULES.items()}
"""Ways to optimise, and modules."""


def loader(batches: list[Any]) -> Any:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def trainer_of(rank: int, ranks: int, strategy: Any = None, **options: Any) -> Trainer:
    """Plain on one process."""
    strategy = "auto" if ranks == 1 else strategy or AMPStrategy(strategies="fsdp")
    defaults = {"max_epochs": 2, "max_steps": -1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    return strategy_cases.trainer_of(strategy, rank=rank, ranks=ranks, **defaults | options)


def trained(module: LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def ways(rank: int | None, ranks: int, cases: dict[str, Case], strategy: Callable[[], Any] = lambda: None) -> Found:
    """What each case leaves, of a rank or of one process."""
    found = {}
    for name, case in cases.items():
        module = case.module()
        vars(module)["on_after_backward"] = lambda: None
        trainer_of(rank or 0, ranks, strategy(), **case.trainer).fit(module, loader(case.batches(rank)))
        del vars(module)["on_after_backward"]
        found[name] = trained(module)
    return found


def offloaded(rank: int) -> dict[str, Tensor]:
    """By a plan given as JSON, whose rules ask for rows in the host's memory."""
    module = Blocks()
    shape = describe(module, batch_size=4)
    made = plan(profile_of_module(shape), devices=2, strategies="fsdp", shape=shape)
    text = made.to_json().replace('"offload": false', '"offload": true')
    strategy = AMPStrategy(plan=Plan.from_json(text))
    trainer_of(rank, 2, strategy).fit(module, loader(Case(Blocks).batches(rank)))
    assert strategy.plan is not None
    assert any(rule.spec == FullyShard(offload=True) for rule in strategy.plan.rules)
    return trained(module)


class Norms(Callback):
    """Of the gradients, by the strategy where it knows them."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        ask = getattr(trainer.strategy, "gradient_norm", None)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        self.found.append(float(ask() if ask else nn.utils.get_total_norm(grads)))


def checked(rank: int, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """With a look at every loss and gradient, and the norm of each step."""
    module, norms, data = Blocks(), Norms(), Case(Blocks).batches(rank if ranks > 1 else None)
    strategy = AMPStrategy(strategies="fsdp", check_finite=True)
    trainer_of(rank, ranks, strategy, callbacks=[norms]).fit(module, loader(data))
    return trained(module), norms.found


def mixed(rank: int) -> Found:
    found = {}
    data = Case(Blocks, cells=EVEN).batches(rank)
    single = [{"rna": {key: value.float() for key, value in b["rna"].items()}} for b in data]
    for name, strategy in {"ddp": DDPStrategy(find_unused_parameters=True), "fsdp": None}.items():
        module = Blocks().float()
        trainer_of(rank, 2, strategy, precision="bf16-mixed").fit(module, loader(single))
        found[name] = trained(module)
    return found


def saved(rank: int, ranks: int, folder: Path, strategy: Any = None, *, resume: Path | None = None) -> Found:
    """Two epochs, each saved; or the second from a checkpoint of the first. Then validated, tested and predicted."""
    module = Blocks()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="val_loss")
    options: dict[str, Any] = {"enable_checkpointing": True, "num_sanity_val_steps": 1}
    trainer = trainer_of(rank, ranks, strategy, callbacks=[saver], **options)
    data = Case(Blocks, cells=EVEN).batches(rank if ranks > 1 else None)
    if ranks == 4:
        data = [{"rna": {k: v.chunk(2)[rank % 2] for k, v in b["rna"].items()}} for b in
                Case(Blocks, cells=EVEN).batches(rank // 2)]  # fmt: skip
    trainer.fit(module, loader(data), loader(data[:2]), ckpt_path=resume)
    (validated,) = trainer.validate(module, loader(data), verbose=False, ckpt_path=folder / "epoch=1.ckpt")
    (tested,) = trainer.test(module, loader(data), verbose=False)
    predicted = trainer.predict(module, loader(data[: 3 + rank]))
    assert predicted is not None
    return {
        "state": trained(module),
        "val_loss": validated["val_loss"],
        "test_loss": tested["val_loss"],
        "predicted": [p.clone() for p in predicted],
        "whole": all(type(p) is nn.Parameter for p in module.parameters()),
    }
