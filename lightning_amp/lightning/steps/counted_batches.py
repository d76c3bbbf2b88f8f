"""Count the bytes of training batches on a CPU, and raise an error in a batch that exceeds the budget.

A CPU has no allocator limit: memory runs out only when the machine's does. So batches are counted, storage by storage,
against the user's budget; the error has the operator, tensor, module, and bytes by kind. Counting is slow, so it is
limited to batches whose bytes may differ from those before:

    the first batches of a plan    the last of them has the optimiser's state, and accumulated gradients
    as many batches once other parameters are trained, such as unfrozen ones, or an optimiser has others
    a batch of which the step reads other values than of those before, by which it may branch
    a batch of more bytes than before, unless its peak would fit even if it grew with the cube of the tensor sizes
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_amp.data.batch import dense_parts, tensors_in
from lightning_amp.footprint.bounded_step import BoundedStep, StepOverBudget
from lightning_amp.footprint.copies.batch_values import BatchReads
from lightning_amp.footprint.copies.fake_copy import map_tensors


class CountedBatches:
    """Count the batches of a plan whose bytes are not known yet, while they run.

    `budget`: largest number of bytes alive; `why`: reason that is added to the error; `reads`: what the counted step
    has read from its batch.
    """

    def __init__(
        self, module: pl.LightningModule, budget: int, *, why: str = "", reads: BatchReads | None = None
    ) -> None:
        self._module, self._budget, self._why, self._reads = module, budget, why, reads
        self._parameters = list(module.parameters())
        self._step: BoundedStep | None = None
        self._known: set[Any] = set()
        self._left = self._most_bytes = self._peak_bytes = 0
        self._sizes: list[int] = []
        self._begin()

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Count the bytes of a batch, if they may exceed those of earlier batches.

        Raises:
            StepOverBudget: An operator's result exceeds the budget; raised by the operator.
        """
        sizes = [part.nbytes for tensor in tensors_in(batch) for part in dense_parts(tensor) or (tensor,)]
        # parameters with gradients, and the number of parameters in each group of the optimisers
        groups = (group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups)
        flags = (parameter.requires_grad for parameter in self._parameters)
        trained = tuple(flags), tuple(len(group["params"]) for group in groups)
        n_bytes = sum(sizes)
        read = self._read(batch)
        if self._known and trained not in self._known:
            self._begin()
            self._why = "it trains other parameters than those before, or an optimiser has others"
        elif self._known and read not in self._known:
            assert self._reads is not None, "it has read something"
            self._left = max(self._left, 1)
            self._why = f"the step reads other values of {', '.join(self._reads.names)} than of batches before"
        elif n_bytes > self._most_bytes and not self._left and self._may_exceed(sizes):
            self._left, self._why = 1, "no batch before it had as many bytes"
        self._known |= {trained, read}
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
            same = len(sizes) == len(self._sizes)
            self._sizes = list(map(max, sizes, self._sizes)) if same else sizes
            self._peak_bytes = max(self._peak_bytes, self._step.peak)
            self._step = None

    def _read(self, args: Any) -> Any:
        """Return what the step reads from a batch, given the arguments of Lightning's loop."""
        if self._reads is None:
            return ()
        named = dict[str, Any]()

        def note(name: str, tensor: Any) -> Any:
            return named.setdefault(name, tensor)

        # the keywords of `training_step`, of which the batch is the first
        map_tensors(next(iter(args[-1].values())), note)
        return self._reads.of(named)

    def _may_exceed(self, sizes: Sequence[int]) -> bool:
        if len(sizes) != len(self._sizes):
            return True
        # attention grows with the square of a length, products of pairs with its cube. The largest growth of a tensor
        # counts, because other tensors may be constant, such as node features of a graph with more edges
        growth = max(1.0, *(n / max(1, counted) for n, counted in zip(sizes, self._sizes, strict=True)))
        return bool(self._peak_bytes * growth**3 > self._budget)

    def unbound(self) -> None:
        """Stop enforcing the budget in this batch."""
        if self._step is not None:
            self._step.unbound()

    def begin_again(self) -> None:
        """Count the first batches of a newly installed plan."""
        self._known.clear()
        self._begin()

    def _begin(self) -> None:
        # the last of these batches has the optimiser's state, and gradients of an earlier batch to accumulate into
        added_up = self._module.trainer.accumulate_grad_batches
        self._left, self._most_bytes, self._peak_bytes = added_up + min(added_up, 2), 0, 0
        self._sizes = []


def refuse_beyond(
    budget: int, trainer: pl.Trainer, *, why: str = "", reads: BatchReads | None = None
) -> Callable[[], None]:
    """Raise in batches of a fit that exceed the budget; `why` is added to the error. Returns an undo."""
    counted = CountedBatches(trainer.lightning_module, budget, why=why, reads=reads)

    def counting(loop: Any, plain: Callable[..., Any], *args: Any) -> Any:
        with counted.counting(args):
            return plain(*args)

    return run_batches_by(trainer, counting)


def called_in(trainer: pl.Trainer, callback: pl.Callback, *, first: bool = False) -> Callable[[], None]:
    """Add a callback to a Trainer; return an undo."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(0 if first else len(callbacks), callback)

    def end() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return end


def run_batches_by(trainer: pl.Trainer, run: Callable[..., Any]) -> Callable[[], None]:
    """Run the batches of a fit by `run(loop, plain, *args)`; return an undo."""
    loops, automatic = trainer.fit_loop.epoch_loop, trainer.lightning_module.automatic_optimization
    loop: Any = loops.automatic_optimization if automatic else loops.manual_optimization
    loop.run = partial(run, loop, loop.run)
    return lambda: vars(loop).pop("run", None)
