"""Record what a training run shows: losses, first gradients, final state, random draws, and what every module returns.

What a module returns is kept as two numbers per cell, enough to find where ranks start to differ:

    print(y) = (<y, cos(1..n)>, ||y||)      of the row of one cell, in double precision

Only tensors whose first axis is the rank's cells are looked at, in the first call of a module, and nothing inside a
decomposed decoder, whose parts differ between ranks by design.
"""

import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from lightning_amp._torch import TorchDispatchMode, hooks_with_kwargs
from lightning_amp.data.batch_parts import tensors_in
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.consistency.same_parameters import common_buffers, differing
from lightning_amp.lightning.steps.cell_weight import count_cells
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.contract.protocol import is_decomposed

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")
"""Folders of code between the user's line and a random draw."""

Prints = list[tuple[int, Tensor]]
"""Prints of some tensors, [cell, 2] each, with the number of their first cell."""
Calls = dict[str, tuple[Prints, Prints]]
"""Name of a module -> prints of the inputs and outputs of its first call, in the order in which the calls ended."""


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run of a few steps has shown.

    Attributes:
        losses: Per step, the loss of every backward pass.
        cells: Cells of each step's batch on this rank, None where its tensors do not agree on a number.
        gradients: Gradients that the first step's optimisers have seen, whole.
        parameters, buffers: The module's state after the last step, whole.
        apart: Buffers that then differ between the ranks.
        draws: Place where random numbers were drawn for cells -> name of the module that was running.
        calls: What every module has read and returned in the first step.
    """

    losses: list[list[float]] = field(default_factory=list)
    cells: list[int | None] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)
    draws: dict[str, str] = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)


class Recorder(Callback):
    """Records a run of a few steps in `record`.

    Args:
        starts_of: Of a step: number of cells of the rank's part -> its first cell in the global batch.
        nudged: Whether to change every weight by one rounding first.
    """

    def __init__(self, starts_of: Callable[[int], Mapping[int, int]], *, nudged: bool) -> None:
        self.record = Record()
        self._starts_of, self._nudged = starts_of, nudged
        self._starts: Mapping[int, int] = {}
        self._running: list[str] = []
        self._stepped: set[int] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the module, in which every technique is installed by now."""
        if self._nudged:
            _nudge(pl_module)
        self._names = {id(child): name for name, child in pl_module.named_modules()}
        self._kinds = {name: type(child).__name__ for name, child in pl_module.named_modules()}
        self._hidden = tuple(f"{name}." for name, child in pl_module.named_modules() if is_decomposed(child))
        step = pl_module.training_step

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self._follow(alone=trainer.world_size == 1):
                return step(*args, **kwargs)

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

    @contextmanager
    def _follow(self, *, alone: bool) -> Iterator[None]:
        """Follow the modules during a step, and in the single process the random draws."""
        self._starts = self._starts_of(len(self.record.losses) - 1)
        before = _states()
        with ExitStack() as stack:
            enter = register_module_forward_pre_hook(self._enter)
            stack.callback(enter.remove)
            leave = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            stack.callback(leave.remove)
            stack.callback(hooks_with_kwargs.pop, leave.id, None)
            if alone:
                stack.enter_context(_Draws(self._drawn))
            yield
        self._running.clear()
        for name, state in _states().items():
            if state != before[name]:
                self.record.draws.setdefault(f"training_step, {name}", "")

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._running.pop() if self._running else ""
        if name and name not in self.record.calls and not name.startswith(self._hidden):
            self.record.calls[name] = self._prints((args, kwargs)), self._prints(output)

    @torch.no_grad()
    def _prints(self, values: Any) -> Prints:
        return [
            (self._starts[len(value)], _print(value))
            for value in tensors_in(values)
            if value.dim() and len(value) in self._starts and value.is_floating_point()
        ]

    def _drawn(self, operator: str, shape: Any) -> None:
        """Note a draw for cells; others are the same on all ranks, whose generators have the same states."""
        if any(n in self._starts for n in shape):
            module = self._running[-1] if self._running else ""
            frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
            line = next(
                (f"{Path(name).name}:{n}" for name, n in frames if not name.startswith(LIBRARIES)), ""
            )
            where = f"{module} ({self._kinds[module]})" if module else "training_step"
            self.record.draws.setdefault(f"{where}, {operator} in {line}", module)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every random draw by torch, with the shape of the first tensor or list of sizes that it is given."""

    def __init__(self, drawn: Callable[[str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # fused attention has the tag, and on a CPU draws nothing: with dropout other operators are used
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func._opname:
            sizes = (value.shape if isinstance(value, Tensor) else value for value in args)
            shape = next((size for size in sizes if isinstance(size, list | tuple)), ())
            self._drawn(func._opname.strip("_"), shape)
        return func(*args, **(kwargs or {}))


def _print(value: Tensor) -> Tensor:
    rows = value.detach().reshape(len(value), -1).double()
    weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).cos_()
    return torch.stack([rows @ weights, rows.norm(dim=1)], dim=1)


def _states() -> dict[str, object]:
    """States of generators other than torch's."""
    name, words, *rest = np.random.get_state()
    return {"numpy.random": (name, np.asarray(words).tobytes(), *rest), "random": random.getstate()}


@torch.no_grad()
def _nudge(module: nn.Module) -> None:
    """Change every weight by one unit of its last place, up or down."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        up = torch.randint(0, 2, parameter.shape, generator=generator).bool()
        parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf).to(parameter)))
