"""Predict the memory of validate, test or predict for a module without a decoder, and choose chunks for a budget.

The validation of a fit is predicted too: beside its step there is the optimizer state of training.

One batch is read as in the run, and the module's step runs on a copy with fake tensors and without gradients. Only the
outermost modules that the step calls can run in chunks. Modules that exceed the budget get a rule with the bytes that
remain within the budget at their call. The step is counted again with these rules for the prediction. A technique with
its own steps (`sequence`) is counted as rank 0 would run it.

Known limits: the prediction is for the length of the first batch; the data module's batch hooks are not called; results
that the Trainer keeps, such as predictions on a CPU, are not counted; computations outside modules are not chunked.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, DataError, PlanError
from lightning_amp.footprint.confirm_count import Shape, shapes_of
from lightning_amp.footprint.copies.copy_batch import length_of
from lightning_amp.footprint.live_bytes import has_storage
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.installing.install import overlap
from lightning_amp.lightning.profiling.count_evaluation import Batch, Evaluated, EvaluationCount
from lightning_amp.lightning.profiling.dry_steps import DrySteps, with_spec
from lightning_amp.lightning.profiling.loaders import each, example_batch, loaders_of, read_streams_ahead
from lightning_amp.lightning.steps.counted_batches import growth_of, may_exceed
from lightning_amp.planning.plan.plan import Explanation, Plan, Validation
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import EVALUATED, evaluated_within, leaves_decoder_whole

STEPS = {
    TrainerFn.VALIDATING: ("validation_step", "validate_loop"),
    TrainerFn.TESTING: ("test_step", "test_loop"),
    TrainerFn.PREDICTING: ("predict_step", "predict_loop"),
}
"""Method of the module, and loop of the Trainer that calls it."""
COARSE = 16
"""Parts of a batch to which the largest batch in chunks is known."""


class EvaluationOfModule:
    """The step of an evaluation: a method of the module, and a function for each loader that returns a batch for it.

    Loaders are read one after the other, each by a step; several that are read together count as one.
    """

    def __init__(self, trainer: pl.Trainer, step: str, takes: Sequence[Callable[[], Any]]) -> None:
        self._trainer, self._step, self._takes = trainer, step, takes
        self._late: Any = None
        self._larger: tuple[int, Any] | None = None
        self.counted: dict[int, list[list[Shape]]] = {}
        """Shapes of the batches of each loader that were counted with the rules which are installed."""
        self.counter = EvaluationCount(trainer, step, several=len(takes) > 1)

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "EvaluationOfModule | None":
        """Return the evaluation of a Trainer; None in a fit. All ranks must call it (loaders_of)."""
        if trainer.state.fn not in STEPS:
            return None
        step, loop = STEPS[trainer.state.fn]
        return cls._of(trainer, step, getattr(trainer, loop))

    @classmethod
    def of_fit(cls, trainer: pl.Trainer) -> "EvaluationOfModule | None":
        """Return the validation of a fit; None without one. All ranks must call it."""
        module = trainer.lightning_module
        validates = trainer.limit_val_batches and is_overridden("validation_step", module)
        if trainer.state.fn != TrainerFn.FITTING or not validates:
            return None
        loop = trainer.fit_loop.epoch_loop.val_loop
        return cls._of(trainer, "validation_step", loop) if loop._data_source.is_defined() else None

    @classmethod
    def _of(cls, trainer: pl.Trainer, step: str, loop: Any) -> "EvaluationOfModule":
        loaders, why = loaders_of(trainer, loop)
        together = isinstance(loaders, CombinedLoader) and loaders._mode != "sequential"
        in_turn = [loaders] if together else each(loaders) or [None]
        for loader in in_turn:
            read_streams_ahead(loader)
        return cls(trainer, step, [partial(example_batch, loader, why) for loader in in_turn])

    def within(self, budget: int, made: Plan, rates: Rates, notes: Sequence[str]) -> tuple[Plan, tuple[Rule, ...]]:
        """Return the plan with the bytes of this step and `notes`, and rules that run it in chunks within the budget.

        Chunks are chosen by the rates of the device. If the budget cannot be met, they use the least memory possible.

        Raises:
            AmpError: No batch can be read, the step fails on fake tensors, or a module cannot run in chunks.
        """
        batches, self.counter.rates = self._batches(), rates
        whole, found, rules = self._chunked(batches, budget, rates, _of_decoder(made))
        without = f": {format_bytes(whole)} without chunks" if rules else ""
        return self._with(found, made, batches, notes, without), rules

    def split(self, steps: DrySteps, made: Callable[[], Plan], rates: Rates, notes: Sequence[str]) -> Plan:
        """Return the plan of a technique with its own steps, with what rank 0 takes in them and sends.

        Args:
            steps: Its steps; their spec is completed if it is open.
            made: Returns the plan without the bytes of this step.

        Raises:
            AmpError: No batch can be read, or the technique does not support the step.
        """
        batches, self.counter.rates = self._batches(), rates

        def counted(*batches: Batch) -> Evaluated:
            undo = steps.put(self._trainer.lightning_module)
            try:
                found = self._count_all(batches, ())
            finally:
                undo()
            return found._replace(seconds=found.seconds + steps.sent_seconds(rates.links))

        if not steps.chosen:
            steps.choose_dims(batches[0].tensors, lambda: counted(*batches).peak)
        found = _most(counted(batch) for batch in batches)
        plan = self._with(found, with_spec(made(), steps, ""), batches, notes)
        return replace(plan, notes=(*plan.notes, *steps.sent_notes()))

    def _with(
        self, found: Evaluated, made: Plan, batches: Sequence[Batch], notes: Sequence[str], without: str = ""
    ) -> Plan:
        noted = self.counter.noted
        how = f"and its shapes or branches depend on values: {noted}" if noted else "without values"
        note = Explanation(f"{self._step} was counted with the first batch, {how}{without}")
        return replace(
            made,
            evaluates=self._step,
            batch_size=length_of(batches[0].tensors) or made.batch_size,
            predicted_base_bytes=found.held,
            predicted_peak_bytes=found.peak,
            predicted_step_seconds=found.seconds,
            rates_device=self.counter.rates.device,
            # notes on training steps do not apply
            notes=(*notes, note),
        )

    def beside_training(self, made: Plan, kept_bytes: int, rates: Rates, *, no_chunks: str = "") -> Plan:
        """Return a fit's plan with its validation: its peak, and rules that run it in chunks within the budget.

        Args:
            kept_bytes: What training keeps during validation: parameters, buffers, optimizer state.
            no_chunks: Why it cannot run in chunks.

        Raises:
            AmpError: As in `within`.
        """
        assert made.budget_bytes is not None, "the plan of a run has a budget"
        batches, before = self._batches(), self._before(made)
        module: Any = self._trainer.lightning_module
        own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _own_tensors(module)}
        more = max(0, kept_bytes - sum(own.values()))
        installed = (*_of_decoder(made), *(rule for rule in made.rules if rule.strategy == EVALUATED))
        try:
            if no_chunks:
                raise PlanError(no_chunks)
            kept, why = () if before is None else before.rules, ""
            peak, rules = self._within(batches, made.budget_bytes - more, rates, installed, kept)
        except AmpError as error:
            # chunks are not possible, or not within the budget; or the step cannot be counted at all
            peak, rules, why = self._count_all(batches, installed).peak, (), str(error)
        left, all_rules = made.budget_bytes - more, (*installed, *rules)

        def peak_of(batch: Batch, rows: int | None = None) -> int:
            return self.counter.count(batch, all_rules, rows=rows).peak

        worst = max(batches, key=peak_of) if len(batches) > 1 else batches[0]
        largest = None
        if peak > left and made.fits:
            largest = _largest_batch(worst, left, peak_of, chunks=bool(all_rules))
        found = self._found(made, worst, peak + more, largest)
        return self._with_peak(made, replace(found, no_chunks=why, rules=rules))

    def sharded(self, made: Plan, bytes_of: Callable[[ModuleProfile], int]) -> Plan:
        """Return a fit's plan with its validation on a rank that has a part of the parameters.

        Args:
            bytes_of: Returns the bytes of such a rank for a step that was counted on one device.

        Raises:
            AmpError: As in `within`.
        """
        assert made.budget_bytes is not None, "the plan of a run has a budget"

        def peak_of(batch: Batch, rows: int | None = None) -> int:
            return bytes_of(self.counter.profile(batch, rows=rows))

        worst = max(self._batches(), key=peak_of)
        peak, largest = peak_of(worst), None
        if peak > made.budget_bytes and made.fits:
            largest = _largest_batch(worst, made.budget_bytes, peak_of, chunks=False)
        return self._with_peak(made, self._found(made, worst, peak, largest))

    def _with_peak(self, made: Plan, found: Validation) -> Plan:
        if (before := self._before(made)) is not None and before.peak_bytes > found.peak_bytes:
            found = replace(before, rules=found.rules)
        return replace(made, validation=found, predicted_peak_bytes=max(made.predicted_peak_bytes, found.peak_bytes))

    def _found(self, made: Plan, batch: Batch, peak: int, largest: int | None) -> Validation:
        return Validation(
            peak_bytes=peak,
            training_bytes=made.predicted_peak_bytes if self._larger is None else made.training_bytes,
            batch_size=length_of(batch.tensors),
            largest_batch=largest,
            loader=batch.loader if len(self._takes) > 1 else None,
        )

    def take_late(self, batch: Any) -> None:
        """Use a batch of the first loader, which could not be read before; others are counted if they can be."""
        self._late = batch

    @contextmanager
    def taking_larger(self, loader: int, batch: Any) -> Iterator[None]:
        """Count a batch of a loader by itself within the block, beside what was counted before."""
        self._larger = loader, batch
        try:
            yield
        finally:
            # it would stay on the device
            self._larger = None

    def is_larger(self, loader: int, batch: Any, peak_bytes: int, budget: int) -> bool:
        """Whether a batch may exceed a budget, because a dim is longer than in each counted batch of its loader."""
        shapes = shapes_of(batch)
        return all(may_exceed(growth_of(one, shapes), peak_bytes, budget) for one in self.counted.get(loader, ()))

    def _before(self, made: Plan) -> Validation | None:
        """Return what was predicted of the validation before a larger batch."""
        return None if self._larger is None else made.validation

    def _batches(self) -> list[Batch]:
        self.counter.forget()
        taken = self._taken() if self._larger is None else [self._larger]
        if self._larger is None:
            # a plan made anew has other rules
            self.counted.clear()
        for loader, batch in taken:
            self.counted.setdefault(loader, []).append(shapes_of(batch))
        return [Batch(loader, self._trainer.precision_plugin.convert_input(batch)) for loader, batch in taken]

    def _taken(self) -> list[tuple[int, Any]]:
        if self._late is None:
            return [(loader, take()) for loader, take in enumerate(self._takes)]
        taken = [(0, self._late)]
        for loader, take in enumerate(self._takes[1:], 1):
            with suppress(DataError):
                taken.append((loader, take()))
        return taken

    def _within(
        self, batches: Sequence[Batch], budget: int, rates: Rates, installed: Sequence[Rule], kept: tuple[Rule, ...]
    ) -> tuple[int, tuple[Rule, ...]]:
        """Return the peak, and rules that run the step in chunks: those that are `kept` from before, if enough."""
        if kept:
            peak = self._count_all(batches, (*installed, *kept)).peak
            if peak <= budget:
                return peak, kept
        _, counted, rules = self._chunked(batches, budget, rates, installed)
        if not kept:
            return counted.peak, rules
        # smaller batches were counted with other rules, and are counted again when they come
        self.counted = {batches[0].loader: self.counted[batches[0].loader][-1:]}
        rules += tuple(rule for rule in kept if not any(overlap(rule.fqn, other.fqn) for other in rules))
        return self._count_all(batches, (*installed, *rules)).peak, rules

    def _chunked(
        self, batches: Sequence[Batch], budget: int, rates: Rates, installed: Sequence[Rule] = ()
    ) -> tuple[int, Evaluated, tuple[Rule, ...]]:
        """Return the peak without chunks, what the step takes with them, and their rules, if needed."""
        calls: dict[str, tuple[int, int]] = {}
        found = self._count_all(batches, installed, calls)
        whole = found.peak
        rules = tuple(
            Rule(
                fqn=fqn,
                spec=evaluated_within(max(1, budget - before), rates),
                strategy=EVALUATED,
                why=f"{format_bytes(most)} are alive within it in {self._step}, of {format_bytes(max(0, budget))}",
                saves_bytes=most - budget,
            )
            for fqn, (before, most) in calls.items()
            if most > budget and not any(overlap(fqn, rule.fqn) for rule in installed)
        )
        if rules and whole > budget:
            with warnings.catch_warnings():
                # the plan reports chunks that exceed the budget
                warnings.simplefilter("ignore")
                found = self._count_all(batches, (*installed, *rules))
        return whole, found, rules

    def _count_all(
        self, batches: Sequence[Batch], rules: Sequence[Rule], calls: dict[str, tuple[int, int]] | None = None
    ) -> Evaluated:
        """Return the most that the steps of all loaders take."""
        return _most(self.counter.count(batch, rules, calls) for batch in batches)


def _most(counts: Iterable[Evaluated]) -> Evaluated:
    return Evaluated(*map(max, zip(*counts, strict=True)))


def _largest_batch(
    batch: Batch, budget: int, peak_of: Callable[[Batch, int | None], int], *, chunks: bool
) -> int | None:
    """Return the most rows of a batch whose step stays within the budget; 0 for none, None if it has no length.

    In chunks, each number of rows is planned anew, so that the result is only exact to a part of the batch.
    """
    rows = length_of(batch.tensors)
    if rows is None:
        return None
    # fits and does not fit
    least, most = 0, rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while most - least > (max(1, rows // COARSE) if chunks else 1):
            middle = (least + most) // 2
            least, most = (middle, most) if peak_of(batch, middle) <= budget else (least, middle)
    return least


def _of_decoder(made: Plan) -> tuple[Rule, ...]:
    """Return the rules of a decoder, which are installed in a step without gradients too."""
    return tuple(rule for rule in made.rules if leaves_decoder_whole(rule))


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if has_storage(tensor)]
