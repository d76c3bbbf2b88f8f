"""Count batches on a CPU, storage by storage, and refuse one that needs more than the budget of its plan.

On a CPU nobody says that memory has ended before the machine does. There the budget that a person has named stands
for it. To count takes time, so it is done where bytes may be others than those of the batches before:

    the first batches of a plan    the last of them has the optimiser's state, and gradients that it adds to
    parameters that were frozen and are trained now, or that an optimiser was given    as many again
    a batch of more bytes than any that was counted

Known limits: what else makes a step larger is not noticed, such as longer generated texts, or a draw that runs more
blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_amp.data.batch import tensors_in
from lightning_amp.footprint.bounded_step import BoundedStep, StepOverBudget


def first_batches(added_up: int) -> int:
    """How many are counted: the last has the optimiser's state, and gradients of one before that it is added to."""
    return added_up + min(added_up, 2)


class CountedBatches:
    """Counts the batches of a plan whose bytes are not known yet, each while it runs.

    Args:
        module: The LightningModule.
        budget: The most bytes that may be alive.
        why: Added to the error of a batch that needs more.
    """

    def __init__(self, module: pl.LightningModule, budget: int, *, why: str = "") -> None:
        self._module, self._budget, self._why = module, budget, why
        self._parameters = list(module.parameters())
        self._step: BoundedStep | None = None
        self._known: set[Any] = set()
        self._left = self._most_bytes = 0
        self._begin()

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Count the bytes of a batch, if they may exceed those of batches before.

        Raises:
            StepOverBudget: By the operator whose result is too much.
        """
        trained, n_bytes = self._trained_now(), sum(tensor.nbytes for tensor in tensors_in(batch))
        if self._known and trained not in self._known:
            self._begin()
            self._why = "it trains other parameters than those before, or an optimiser has others"
        elif n_bytes > self._most_bytes and not self._left:
            self._left, self._why = 1, "no batch before it had as many bytes"
        self._known.add(trained)
        self._most_bytes = max(self._most_bytes, n_bytes)
        if not self._left:
            yield
            return
        self._left -= 1
        self._step = BoundedStep(self._module, self._budget)
        self._step.start(batch, self._module.trainer.optimizers)
        try:
            yield
        except StepOverBudget as error:
            if self._why:
                error.args = (f"{error}; {self._why}",)
            raise
        finally:
            self._step.stop()
            self._step = None

    def unbound(self) -> None:
        """Refuse nothing more of this batch."""
        if self._step is not None:
            self._step.unbound()

    def begin_again(self) -> None:
        """Another plan is installed, whose first batches come now."""
        self._known.clear()
        self._begin()

    def _begin(self) -> None:
        self._left, self._most_bytes = first_batches(self._module.trainer.accumulate_grad_batches), 0

    def _trained_now(self) -> Any:
        """Which parameters need gradients, and how many each group of an optimiser has."""
        groups = (group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups)
        flags = (parameter.requires_grad for parameter in self._parameters)
        return tuple(flags), tuple(len(group["params"]) for group in groups)


def refuse_beyond(budget: int, trainer: pl.Trainer, *, why: str = "") -> Callable[[], None]:
    """Refuse batches of a fit that need more bytes, with a reason why none was refused before; returns what ends it."""
    module, loops = trainer.lightning_module, trainer.fit_loop.epoch_loop
    loop: Any = loops.automatic_optimization if module.automatic_optimization else loops.manual_optimization
    counted, plain = CountedBatches(module, budget, why=why), loop.run

    def run(*args: Any) -> Any:
        with counted.counting(args):
            return plain(*args)

    loop.run = run
    return lambda: vars(loop).pop("run", None)
