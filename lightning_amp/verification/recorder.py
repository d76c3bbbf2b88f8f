"""Record what a training run shows: losses, first gradients, final state, and where random numbers are drawn."""

import random
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.consistency.same_parameters import common_buffers, differing
from lightning_amp.lightning.steps.cells import count_cells
from lightning_amp.lightning.strategy.strategy import AMPStrategy


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run of a few steps has shown.

    Attributes:
        losses: Per step, the loss of every backward pass.
        cells: Cells of each step's batch on this rank, None where its tensors do not agree on a number.
        gradients: Gradients that the first step's optimisers have seen, whole.
        parameters, buffers: The module's state after the last step, whole.
        apart: Buffers that then differ between the ranks.
        draws: Modules that drop values at random, and generators, if a training step has drawn from any.
    """

    losses: list[list[float]] = field(default_factory=list)
    cells: list[int | None] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)


class Recorder(Callback):
    """Records a run of a few steps in `record`."""

    def __init__(self) -> None:
        self.record = Record()
        self._stepped: set[int] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the module's step, in which every technique is installed by now."""
        step = pl_module.training_step

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            before = _states()
            output = step(*args, **kwargs)
            drawn = [f"training_step, {name}" for name, state in _states().items() if state != before[name]]
            named = (
                (n, part) for n, part in pl_module.named_modules() if "training_step, torch.random" in drawn
            )
            drops = [f"{n} ({type(part).__name__})" for n, part in named if _drops(part)]
            self.record.draws = list(dict.fromkeys([*self.record.draws, *drops, *drawn]))
            return output

        # on the instance, and removed at the end: the class is the user's
        pl_module.training_step = training_step  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Planning and installing may have drawn numbers; one process has not."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A step begins."""
        self.record.losses.append([])
        self.record.cells.append(count_cells(batch))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note the loss."""
        self.record.losses[-1].append(float(loss.detach()))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the gradients of the first step, as averaged over ranks and before clipping."""
        if len(self.record.losses) > 1 or id(optimizer) in self._stepped:
            return
        self._stepped.add(id(optimizer))
        shards = trainer.strategy._shards if isinstance(trainer.strategy, AMPStrategy) else Shards()
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def whole() -> dict[str, Any]:
            gradients = {
                name: p.grad.detach().clone()
                for name, p in pl_module.named_parameters()
                if id(p) in own and p.grad is not None
            }
            return shards.saved_state(gradients, in_parts=False)

        # in a step of manual optimisation fsdp's root is gathered
        gradients = whole() if shards.units is None else shards.units.on_rows(whole)
        self.record.gradients = gradients | self.record.gradients

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the final state; whole, for shards are given back later."""
        state = trainer.strategy.lightning_module_state_dict()
        names = {name for name, _ in pl_module.named_parameters(remove_duplicate=False)}
        kept = {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}
        self.record.parameters = {name: value for name, value in kept.items() if name in names}
        self.record.buffers = {name: value for name, value in kept.items() if name not in names}
        if isinstance(trainer.strategy, AMPStrategy):
            buffers = differing(common_buffers(pl_module), trainer.strategy.mesh)
            self.record.apart = [name for name, _, _ in buffers]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module back as it was."""
        vars(pl_module).pop("training_step", None)


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values at random: torch's layers keep the probability under one of these names."""
    found = (getattr(module, name, 0) for name in ("p", "dropout", "drop_prob"))
    return module.training and any(isinstance(p, float) and p > 0 for p in found)


def _states() -> dict[str, object]:
    """States of the generators on the CPU."""
    name, words, *rest = np.random.get_state()
    return {
        "torch.random": torch.random.get_rng_state().numpy().tobytes(),
        "numpy.random": (name, np.asarray(words).tobytes(), *rest),
        "random": random.getstate(),
    }
