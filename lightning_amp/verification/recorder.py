"""What one training run shows to be compared: losses, first gradients, final state, and what every module has made."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from lightning_amp.lightning.steps.cell_weight import count_cells
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification.keyed_draws import KeyedDraws
from lightning_amp.verification.module_outputs import Calls, Trace

StartsOf = Callable[[int], Mapping[int, int]]


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run of a few steps has shown.

    Attributes:
        losses: Per step, the loss of every backward pass.
        cells: Cells of each step's batch on this rank, None where its tensors do not tell.
        gradients: Gradients that the first step's optimisers have seen, whole.
        parameters, buffers: The module's state after the last step, whole.
        apart: Buffers that then differ between the ranks.
        sites: Places where numbers were drawn for cells.
        elsewhere: Generators other than torch's that a step has drawn from.
        calls: What every module has made in the first step.
    """

    losses: list[list[float]] = field(default_factory=list)
    cells: list[int | None] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)
    calls: Calls = field(default_factory=dict)


class Recorder(Callback):
    """Records a run of a few steps in `record`.

    Args:
        starts_of: Of a step: number of cells of the rank's part -> its first cell in the global batch.
        native: Sites whose draws are left to the default generator; None means all.
        nudged: Whether to change the weights by one rounding first.
    """

    def __init__(self, starts_of: StartsOf, *, native: frozenset[str] | None, nudged: bool = False) -> None:
        self.record = Record()
        self._starts_of, self._native, self._nudged = starts_of, native, nudged
        self._stepped: set[int] = set()
        self._backward, self._in_step = ExitStack(), False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the module, which now has everything installed."""
        if self._nudged:
            _nudge(pl_module)
        self._trace = Trace(pl_module)
        self.record.calls = self._trace.calls
        step = pl_module.training_step

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self._watch():
                return step(*args, **kwargs)

        # on the instance, and taken off at the end: the class is the user's
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
        """Note the loss; what the backward pass computes again draws as it did before."""
        self.record.losses[-1].append(float(loss.detach()))
        if not self._in_step:
            self._backward.enter_context(self._trace.follow(self._where))
            self._backward.enter_context(self._draws)
        self._backward.enter_context(self._draws.again())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gradients are there."""
        self._backward.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The process trains again."""
        self._backward.close()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the gradients of the first step, as averaged over ranks and before clipping."""
        if len(self.record.losses) > 1 or id(optimizer) in self._stepped:
            return
        self._stepped.add(id(optimizer))
        shards = trainer.strategy._shards if isinstance(trainer.strategy, AMPStrategy) else Shards()

        def whole() -> dict[str, Any]:
            return shards.saved_state(_gradients(pl_module, optimizer), in_parts=False)

        # in a step of manual optimisation fsdp's root is gathered
        gradients = whole() if shards.units is None else shards.units.on_rows(whole)
        self.record.gradients |= {
            name: grad for name, grad in gradients.items() if name not in self.record.gradients
        }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the final state; whole, for shards are given back later."""
        state = trainer.strategy.lightning_module_state_dict()
        names = {name for name, _ in pl_module.named_parameters(remove_duplicate=False)}
        kept = {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}
        self.record.parameters = {name: value for name, value in kept.items() if name in names}
        self.record.buffers = {name: value for name, value in kept.items() if name not in names}
        if isinstance(trainer.strategy, AMPStrategy):
            self.record.apart = [
                name for name, _, _ in differing(common_buffers(pl_module), trainer.strategy.mesh)
            ]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module its own step back."""
        vars(pl_module).pop("training_step", None)

    @contextmanager
    def _watch(self) -> Iterator[None]:
        self._where = where = self._starts_of(len(self.record.losses) - 1)
        self._draws = draws = KeyedDraws(where, self._trace.running, native=self._native)
        before, self._in_step = _generators(), True
        with self._trace.follow(where), draws:
            yield
        self._in_step = False
        self.record.elsewhere |= {name for name, state in _generators().items() if state != before[name]}
        self.record.sites += [site for site in draws.sites if site not in self.record.sites]


def _gradients(module: LightningModule, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of those of an optimiser's parameters."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        name: p.grad.detach().clone()
        for name, p in module.named_parameters()
        if id(p) in own and p.grad is not None
    }


def _generators() -> dict[str, object]:
    """States of the generators whose draws cannot be made equal."""
    name, words, *rest = np.random.get_state()
    return {"numpy.random": (name, np.asarray(words).tobytes(), *rest), "random": random.getstate()}


@torch.no_grad()
def _nudge(module: nn.Module) -> None:
    """Change every weight by one unit of its last place, up or down."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        up = torch.randint(0, 2, parameter.shape, generator=generator).bool()
        parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf).to(parameter)))
