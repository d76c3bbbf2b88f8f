"""The first batches of a plan are counted on a CPU, storage by storage: one that needs more than its budget is refused.

On a CPU nobody says that memory has ended before the machine does. There the budget that a person has named stands
for it.

Known limit: a later batch that is larger than the first ones is not counted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_amp.footprint.bounded_step import BoundedStep


def first_batches(added_up: int) -> int:
    """How many are counted: the last has the optimiser's state, and gradients of one before that it is added to."""
    return added_up + min(added_up, 2)


class CountedBatches:
    """Counts a plan's first batches, each while it runs.

    Args:
        module: The LightningModule.
        budget: The most bytes that may be alive.
    """

    def __init__(self, module: pl.LightningModule, budget: int) -> None:
        self._module, self._budget = module, budget
        self.begin_again()
        self._step: BoundedStep | None = None

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Count what is made of a batch, as long as the plan is new.

        Raises:
            OverBudget: By the operator whose result is too much.
        """
        if not self._left:
            yield
            return
        self._left -= 1
        self._step = BoundedStep(self._module, self._budget)
        self._step.start(batch, self._module.trainer.optimizers)
        try:
            yield
        finally:
            self._step.stop()
            self._step = None

    def unbound(self) -> None:
        """Refuse nothing more of this batch."""
        if self._step is not None:
            self._step.unbound()

    def begin_again(self) -> None:
        """Another plan is installed, whose first batches come now."""
        self._left = first_batches(self._module.trainer.accumulate_grad_batches)


def refuse_beyond(budget: int, trainer: pl.Trainer) -> Callable[[], None]:
    """Refuse batches of a fit that need more bytes; returns what ends it."""
    module, loops = trainer.lightning_module, trainer.fit_loop.epoch_loop
    loop: Any = loops.automatic_optimization if module.automatic_optimization else loops.manual_optimization
    counted, plain = CountedBatches(module, budget), loop.run

    def run(*args: Any) -> Any:
        with counted.counting(args):
            return plain(*args)

    loop.run = run
    return lambda: vars(loop).pop("run", None)
