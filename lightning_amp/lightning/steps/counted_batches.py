"""Count the bytes of training batches on a CPU, and raise an error in a batch that exceeds the budget.

A CPU has no allocator limit: memory runs out only when the machine's does. So batches are counted, storage by storage,
against the user's budget; the error has the operator, tensor, module, and bytes by kind. Counting is slow, so it is
limited to batches whose bytes may differ from those before:

    the first batches of a plan    the last of them has the optimiser's state, and accumulated gradients
    further ones                   while an optimiser has not stepped, or what batches keep for later ones grows
    as many batches once other parameters are trained, such as unfrozen ones, or an optimiser has others
    one batch once an optimiser has state of other parameters than before
    a batch of which the step reads other values than of those before, by which it may branch
    every batch of a step in which numbers drawn by Python or NumPy have decided how many operators run; until then, or
        for 64 batches, every batch in which such numbers are drawn
    every batch of a step whose shapes values decide: counted by notes of its first batch (noted_values.py), measured
        with values, or one that reads buffers which it changes
    a batch that is larger in any dim than each counted one, unless its peak would fit even if it grew with the cube of
        the larger dims
    batches number 4, 8, 16, ...   for steps that do more work later, for a reason that nothing here sees

A counted batch runs uncompiled, also of a module that torch.compile has wrapped; the others run compiled.
Tensors that a counted batch keeps, as in accumulation by hand, count in the next one too.

Known limit: work that a step adds without any of these signs is found at the next power of two.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, prod
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_amp.footprint.bounded_step import BoundedStep, StepOverBudget
from lightning_amp.footprint.confirm_count import Shape, StepMakes, difference, shapes_of
from lightning_amp.footprint.copies.fake_copy import map_tensors
from lightning_amp.footprint.module_profile import FORWARD, REAL, ModuleProfile
from lightning_amp.footprint.run.foreseen import copies_in_callbacks
from lightning_amp.lightning._compat import rank_zero_info, rank_zero_warn
from lightning_amp.random_streams import drawn_between, host_streams

MOST = 64
"""Most batches in a row that are counted because an optimiser has not stepped, or because what batches keep grows."""
GROWS = 1 / 1000
"""Share of the budget by which batches have to keep more than those before."""


DRAWN = "numbers that are drawn in Python decide which operators run, and the plan was counted for a few draws"
BY_VALUES = "values decide its shapes, and the plan was counted for the first batch of each rank"


class CountedBatches:
    """Count the batches of a plan whose bytes are not known yet, while they run.

    `budget`: largest number of bytes alive; `why`: reason that is added to the error; `predicted`: profile of the
    plan's step, by which a batch is known of which other values are read, and with which the first step is compared;
    `trains`: whether these are batches of training.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        budget: int,
        *,
        why: str = "",
        predicted: ModuleProfile | None = None,
        trains: bool = True,
    ) -> None:
        self._module, self._budget, self._why, self._trains = module, budget, why, trains
        self._predicted, self._reads = predicted, None if predicted is None else predicted.reads
        self.noted = predicted is not None and (
            predicted.noted or predicted.measured == REAL or bool(predicted.own_reads)
        )
        """Whether every batch is counted, because values decide its bytes."""
        self._why_noted, self._drawn = BY_VALUES, set[tuple[tuple[Shape, ...], int]]()
        self._parameters = list(module.parameters())
        self._step: BoundedStep | None = None
        self._last: BoundedStep | None = None
        self._known: set[Any] = set()
        self._states: tuple[int, ...] = ()
        self._stepped: set[int] = set()
        self._shapes: list[list[Shape]] = []
        self._left = self._n_batches = self._peak_bytes = self._kept_bytes = self._counted_in_a_row = 0
        self._begin()

    @contextmanager
    def counting(self, batch: Any, copied: Sequence[Tensor] = ()) -> Iterator[None]:
        """Count the bytes of a batch, if they may exceed those of earlier batches, and what was copied for it.

        Raises:
            StepOverBudget: An operator's result exceeds the budget; raised by the operator.
        """
        shapes = shapes_of(batch)
        if why := self._reason(batch, shapes):
            self._why = why
        self._n_batches += 1
        if not self._left:
            yield
            return
        self._left -= 1
        self._step = BoundedStep(self._module, self._budget)
        trainer = self._module.trainer
        # logged values, of a few bytes, are in no plan
        after = self._last if self._kept_bytes > GROWS * self._budget else None
        held = [*copies_in_callbacks(trainer), *(("copy for a batch that runs again", one) for one in copied)]
        self._step.start(batch, trainer.optimizers, after=after, averaged=held)
        streams = host_streams()
        try:
            # operators are counted one by one. Dynamo would compile the counter, and never again what it skips here
            with torch.compiler.set_stance("force_eager"):
                yield
            self._confirm(self._step, batch, beside=sum(one.nbytes for one in copied))
            # of a whole step: one that ends early has fewer operators for another reason
            if not self.noted and drawn_between(streams, host_streams()):
                self._watch_draws(self._step, shapes)
        except StepOverBudget as error:
            if self._why:
                error.args = (f"{error}; {self._why}",)
            raise
        finally:
            self._step.stop()
            self._counted_in_a_row += 1
            if not any(_covers(counted, shapes) for counted in self._shapes):
                self._shapes.append(shapes)
            self._peak_bytes = max(self._peak_bytes, self._step.peak)
            self._go_on(self._step)
            self._last, self._step = self._step, None

    def run(self, loop: Any, plain: Callable[..., Any], *args: Any) -> Any:
        """Run a batch by `plain(*args)`, and count it if its bytes may exceed those of earlier batches."""
        with self.counting(args):
            return plain(*args)

    def _reason(self, batch: Any, shapes: Sequence[Shape]) -> str:
        """Decide whether a batch is counted; return why in words, "" for the first ones."""
        optimizers = self._module.trainer.optimizers
        # parameters with gradients, and the number of parameters in each group of the optimisers
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        flags = (parameter.requires_grad for parameter in self._parameters)
        trained = tuple(flags), tuple(len(group["params"]) for group in groups)
        before, known, read = self._states, self._known, self._read(batch)
        self._states, self._known = tuple(len(one.state) for one in optimizers), known | {trained, read}
        if known and trained not in known:
            self._begin()
            return "it trains other parameters than those before, or an optimiser has others"
        if known and read not in known:
            assert self._reads is not None, "it has read something"
            self._left = max(self._left, 1)
            return f"the step reads other values of {', '.join(self._reads.names)} than of batches before"
        if self._left:
            return self._why_noted if self.noted else ""
        n = self._n_batches
        if before != self._states:
            why = "an optimiser has stepped parameters since that it had not stepped before"
        elif self._may_exceed(shapes):
            why = "no batch before it was as large in all of its dims"
        elif self.noted:
            why = self._why_noted
        elif n >= 4 and n & (n - 1) == 0:
            why = f"{n} batches ran before it, of which not all were counted"
        else:
            self._counted_in_a_row, self._last = 0, None
            return ""
        self._left = 1
        return why

    def _confirm(self, step: BoundedStep, batch: Any, *, beside: int) -> None:
        """Tell how the step differs from its count: the last of the first batches is the one that was counted.

        `beside`: bytes of copies that lie beside the step, of which no plan knows.
        """
        counted, self._predicted = self._predicted, None if self._left == 0 else self._predicted
        # values decide otherwise in another batch than the one that was counted
        if counted is None or self._left or counted.foreseen or counted.noted:
            return
        trainer = self._module.trainer
        # several ranks also average gradients; a longer window has the bytes of two batches, in another one
        if trainer.world_size > 1 or trainer.accumulate_grad_batches > 2:
            return
        real = StepMakes.of(batch, step.lives, step.work)
        peak = step.peak - beside
        said = difference(counted.makes, real, predicted=counted.peak_bytes, measured=peak)
        if said:
            (rank_zero_warn if peak > counted.peak_bytes else rank_zero_info)(said)

    def _go_on(self, step: BoundedStep) -> None:
        """Count the next batch too if this one does not show yet what a step takes."""
        self._stepped |= step.stepped
        optimizers = self._module.trainer.optimizers if self._trains else ()
        waits = any(id(one) not in self._stepped and not one.state for one in optimizers)
        kept = step.kept_bytes(self._module.trainer.optimizers)
        grows = kept - self._kept_bytes > GROWS * self._budget
        self._kept_bytes = max(self._kept_bytes, kept)
        if (waits or grows) and not self._left and self._counted_in_a_row < MOST:
            self._left = 1

    def _watch_draws(self, step: BoundedStep, shapes: Sequence[Shape]) -> None:
        """Count further batches, in which numbers drawn by Python or NumPy may decide what runs."""
        self._drawn.add((tuple(shapes), sum(phase == FORWARD for phase, _ in step.work)))
        # a first batch may fill what is kept
        if self._n_batches > 2 and len(self._drawn) > len({of for of, _ in self._drawn}):
            self.noted, self._why_noted = True, DRAWN
        elif self._n_batches < MOST:
            self._left = max(self._left, 1)
        if self._n_batches <= 2:
            self._drawn.clear()

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

    def _may_exceed(self, shapes: Sequence[Shape]) -> bool:
        growth = min((growth_of(counted, shapes) for counted in self._shapes), default=inf)
        return may_exceed(growth, self._peak_bytes, self._budget)

    def unbound(self) -> None:
        """Stop enforcing the budget in this batch."""
        if self._step is not None:
            self._step.unbound()

    def begin_again(self) -> None:
        """Count the first batches of a newly installed plan, of whose step there is no profile here."""
        self._predicted = None
        self._known.clear()
        self._begin()

    def _begin(self) -> None:
        # the last of these batches has the optimiser's state, and gradients of an earlier batch to accumulate into
        added_up = self._module.trainer.accumulate_grad_batches
        self._left = added_up + min(added_up, 2)
        self._n_batches = self._peak_bytes = self._kept_bytes = self._counted_in_a_row = 0
        self._shapes = []


def may_exceed(growth: float, n_bytes: int, budget: int) -> bool:
    """Whether a batch that is so many times as long as one of `n_bytes` may exceed a budget."""
    # attention grows with the square of a length, products of pairs with its cube. The largest growth of a tensor
    # counts, because other tensors may be constant, such as node features of a graph with more edges
    return growth > 1 and bool(n_bytes * growth**3 > budget)


def growth_of(counted: Sequence[Shape], shapes: Sequence[Shape]) -> float:
    """Return by how much the dims of a batch exceed those of a counted one, for the tensor that grows most."""
    if list(map(len, counted)) != list(map(len, shapes)):
        return inf
    pairs = zip(counted, shapes, strict=True)
    return max((prod(max(1.0, n / max(1, m)) for m, n in zip(a, b, strict=True)) for a, b in pairs), default=1.0)


def _covers(counted: Sequence[Shape], shapes: Sequence[Shape]) -> bool:
    return growth_of(counted, shapes) <= 1


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


def run_validation_by(trainer: pl.Trainer, run: Callable[..., Any]) -> Callable[[], None]:
    """Run the validation batches of a fit by `run(plain, batch, ...)`; return an undo."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loop._evaluation_step = partial(run, loop._evaluation_step)
    return lambda: vars(loop).pop("_evaluation_step", None)
