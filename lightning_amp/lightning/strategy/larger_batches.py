"""Count batches that are larger than those before, before they run, and plan again for one that exceeds the budget.

    in no dim longer than a counted batch, or within      it runs
    the budget even if it grew with the cube of its dims
    longer                                                counted on fake tensors, with the plan's techniques, in a
                                                          second or less; on several ranks each counts its own
    its count fits                                        it runs
    its count does not fit                                the plan is made again for it, of the techniques that may
                                                          change between two batches, and stays
    no plan fits                                          an error on all ranks, before it runs

A batch of which values decide what it takes is counted by notes of a forward pass of it (noted_values.py).

Collectives, if there are several ranks: a number per batch, by which ranks learn that one of them has a larger batch;
then those of largest_rank.py.

Known limits: not for modules with a decoder, over a model axis, for techniques that replace the module's steps, nor on
several GPUs, where the number per batch would wait for the device. What a batch takes for other reasons than its dims
is found while it runs (counted_batches.py).
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_amp.errors import AmpError, DoesNotFitError, PlanError
from lightning_amp.footprint.confirm_count import Shape, shapes_of
from lightning_amp.lightning._compat import rank_zero_info, rank_zero_warn
from lightning_amp.lightning.consistency.replicas import decide_on_one_rank
from lightning_amp.lightning.profiling.make_step_plan import make_step_plan, plan_on_device
from lightning_amp.lightning.steps.counted_batches import growth_of, may_exceed
from lightning_amp.lightning.steps.out_of_memory import largest
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.lightning.strategy.largest_rank import NOT_COUNTED, for_largest_batch, largest_of_ranks
from lightning_amp.on_demand import first_of
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.reports.plan_report import shortfall, techniques
from lightning_amp.progress import shown_if_long
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import BETWEEN_BATCHES, PREDICTIONS, in_order, rules_in_order, stage_search

RESERVE = 0.1
"""Share of the budget that a plan leaves where values have exceeded it: another batch may take more."""
BEGUN = "a run that has begun cannot change to it"


class LargerBatches:
    """The batches of a fit that are larger than those for which its plan was made.

    Args:
        facts: What the plan was made with; its step has been profiled on rank 0.
        current: Returns the installed plan.
        aside: Restores the module without techniques inside its `with` block.
        exchange: Installs a plan instead of the one before, on all ranks or on none, and returns whether it did.
        keep: Makes a plan that is installed already, with another prediction, the current one. Both are given what
            counted the plan.

    Attributes:
        noted: Whether values decide what a batch takes.
        written: Parameters that a step changes before its update, and "batch" if it changes the batch.
    """

    def __init__(
        self,
        facts: PlanningContext,
        current: Callable[[], Plan],
        *,
        aside: Callable[[], AbstractContextManager[Any]],
        exchange: Callable[[Plan, PlanningContext], bool],
        keep: Callable[..., None],
    ) -> None:
        self._facts, self._current = facts, current
        self._aside, self._exchange, self._keep = aside, exchange, keep
        assert facts.step is not None, "a fit has one"
        self._step: Any = facts.step.of_batch
        # of rank 0, which alone has counted a batch
        seen = facts.profiled[0] if facts.strategy.global_rank == 0 else None
        makes = None if seen is None else seen.profile.makes
        # as the step gets it: hooks that move a batch may change it
        counted = facts.step.shapes() if makes is None else [*makes.batch]
        own = _dims(counted), seen is not None and seen.profile.noted, facts.written
        shapes, self.noted, self.written = facts.strategy.broadcast(own)
        self._known = [(shapes, current().training_bytes)]
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, as of a saved Trainer, which counts nothing."""
        return {"_step": None}

    @staticmethod
    def are_counted(facts: PlanningContext, plan: Plan) -> bool:
        """Whether larger batches of a plan's run can be counted; the same on all ranks."""
        strategy = facts.strategy
        device = strategy.root_device.type == "cpu" or strategy.world_size == 1
        single = plan.mesh.model == 1 and not plan.strata_bytes and facts.steps is None
        return device and single and plan.diagnosis is not None and not plan.uncounted and not facts.counts_decoder

    def run(self, loop: Any, plain: Callable[..., Any], *args: Any) -> Any:
        """Run a batch by `plain(*args)`, by a plan in which it fits.

        Raises:
            DoesNotFitError: No plan fits, on all ranks.
        """
        if self._step is None:
            return plain(*args)
        # the keywords of `training_step`, of which the batch is the first
        batch = next(iter(args[-1].values()))
        shapes = _dims(shapes_of(batch))
        if largest(float(self._may_exceed(shapes)), self._facts.strategy.root_device):
            self._look(batch, shapes)
        return plain(*args)

    @property
    def _number(self) -> int:
        return self._facts.trainer.fit_loop.epoch_loop.batch_idx

    def _shown(self, number: int) -> AbstractContextManager[Any]:
        facts = self._facts
        show = facts.trainer.progress_bar_callback is not None and facts.strategy.global_rank == 0
        return shown_if_long(f"planning for batch {number}", show=show)

    def _counting(self, batch: Any) -> PlanningContext:
        """Return what a plan for a batch is made with."""
        found = copy.copy(self._facts)
        found.step = self._step(batch)
        return found

    def _may_exceed(self, shapes: list[Shape]) -> bool:
        budget = self._facts.budget
        return all(may_exceed(growth_of(known, shapes), n_bytes, budget) for known, n_bytes in self._known)

    def _look(self, batch: Any, shapes: list[Shape]) -> None:
        """Count a batch, and make its plan the current one if it is another one or takes more."""
        before, counting, number = self._current(), self._counting(batch), self._number
        said, decide = self._in_words(number, shapes), partial(_between_batches, counting, before)
        try:
            with self._aside(), self._shown(number):
                found = for_largest_batch(before, counting, decide, f"batch {number} of rank {{}}")
        except AmpError as error:
            # as many bytes as are known: a batch of these dims is not counted again
            self._known.append((shapes, self._facts.budget))
            return self._refuse(f"{said}, exceeds the budget: {error}")
        self._known.append((shapes, found.training_bytes))
        if found.fits is False:
            self._refuse(f"{said}, does not fit: {shortfall(found)}")
        missing = [note for note in found.notes if note.startswith(NOT_COUNTED) and note not in before.notes]
        for note in missing:
            rank_zero_warn(f"{said}: {note}")
        if found.rules != before.rules:
            if not self._exchange(found, counting):
                return self._refuse(
                    f"{said}, exceeds the budget: {techniques(found.strategies)} could not be installed for it"
                )
            rank_zero_info(
                f"{said}, would exceed the budget; from here on it is {techniques(found.strategies)}, for which"
                f" {format_bytes(found.predicted_peak_bytes)} are predicted, instead of"
                f" {techniques(before.strategies)}"
            )
        elif missing or found.predicted_peak_bytes > before.predicted_peak_bytes:
            self._keep(found, counting, logs=False)
        return None

    def again(self, batch: Any) -> str:
        """Install a plan for a batch that has exceeded the budget by what values decide, and describe it.

        Raises:
            DoesNotFitError: No plan fits, on all ranks.
        """
        before, counting, number = self._current(), self._counting(batch), self._number
        strategy = self._facts.strategy
        said = f"batch {number}, of which values decide what it takes, has exceeded the budget"
        try:
            with self._aside(), self._shown(number):
                rank, _, _ = largest_of_ranks(before, counting)
                agree = partial(decide_on_one_rank, rank=strategy.global_rank, broadcast=strategy.broadcast)
                found = agree(partial(_with_reserve, counting, before), decider=rank)
                decide = partial(_between_batches, counting, before)
                found = for_largest_batch(found, counting, decide, f"batch {number} of rank {{}}", deciders=(rank,))
        except AmpError as error:
            raise DoesNotFitError(f"{said}: {error}") from error
        if found.fits is False or found.rules == before.rules:
            raise DoesNotFitError(f"{said}, and no plan fits it: {shortfall(found)}. What it has changed was put back")
        if not self._exchange(found, counting):
            return ""
        return (
            f"{techniques(found.strategies)}, for which {format_bytes(found.predicted_peak_bytes)} are predicted,"
            f" instead of {techniques(before.strategies)}"
        )

    def _refuse(self, said: str) -> None:
        if self._facts.request.refuses:
            raise DoesNotFitError(
                f"{said}. It was not run; batches before it were. AMPStrategy(on_predicted_oom='warn'), in YAML"
                " `on_predicted_oom: warn`, trains anyway"
            )
        if not self._warned:
            rank_zero_warn(said)
        self._warned = True

    def _in_words(self, number: int, shapes: list[Shape]) -> str:
        """Describe a batch by its tensor that is most beyond the most similar counted batch."""
        nearest, _ = min(self._known, key=lambda one: growth_of(one[0], shapes))
        pairs = list(zip(nearest, shapes, strict=False))
        known, shape = max(pairs, key=lambda pair: growth_of(pair[:1], pair[1:]), default=((), ()))
        dims = f" ({list(shape)}, and {list(known)} was counted)"
        which = dims if growth_of(nearest, shapes) > 1 and shape else " on another rank"
        return f"batch {number}, which is larger than those before{which}"


def _between_batches(counting: PlanningContext, before: Plan, *, reserve: int = 0) -> Plan:
    """Make a plan for another batch, of the techniques that may change between two batches.

    Args:
        reserve: Bytes of the budget that the plan leaves.

    Raises:
        PlanError: The techniques of the plan before may not change, or were given.
    """
    fixed = [name for name in before.strategies if name in PREDICTIONS and name not in BETWEEN_BATCHES]
    if fixed or counting.request.given_plan is not None:
        kept = f"{', '.join(fixed)} cannot change in a run that has begun" if fixed else "its plan was given"
        raise PlanError(f"{kept}: use smaller batches, or let the largest come first, for which the plan is made then")
    anew = copy.copy(counting)
    anew.read_again()
    seen, why = anew.profiled
    if seen is None:
        raise PlanError(why)
    late = dict.fromkeys((name for name in PREDICTIONS if name not in BETWEEN_BATCHES), BEGUN)
    allowed = stage_search().without(replace(seen, refused=first_of(seen.refused, late)), BEGUN)

    made = plan_on_device(
        # compiled blocks stay as they are
        replace(anew.inputs(model_ranks=1), compile=False).less(reserve),
        lambda given: make_step_plan(given, anew.step, allowed),
        device=anew.device,
        module=anew.trainer.lightning_module,
    )
    return _continued(made.plan, before)


def _with_reserve(counting: PlanningContext, before: Plan) -> Plan:
    """Make a plan for a batch with room for others, of which values may decide more; without room if none has it."""
    found = _between_batches(counting, before, reserve=int(RESERVE * counting.budget))
    return _between_batches(counting, before) if found.fits is False else replace(found, budget_bytes=counting.budget)


def _continued(plan: Plan, before: Plan) -> Plan:
    """Return a new plan with what a run that has begun keeps: its ranks, its validation, rules beside techniques."""
    names = {name for name in before.strategies if name not in PREDICTIONS}
    rules = [rule for rule in before.rules if rule.strategy not in PREDICTIONS]
    own = [rule for rule in plan.rules if rule.strategy in PREDICTIONS]
    validation = before.validation and replace(before.validation, training_bytes=plan.predicted_peak_bytes)
    peak = max(plan.predicted_peak_bytes, 0 if validation is None else validation.peak_bytes)
    notes = [note for note in before.notes if isinstance(note, Explanation) and note not in plan.notes]
    return replace(
        plan,
        policy=before.policy,
        mesh=before.mesh,
        axes=before.axes,
        balance_cells=before.balance_cells,
        strategies=in_order({*names, *(rule.strategy for rule in own)}),
        rules=rules_in_order((*rules, *own)),
        predicted_peak_bytes=peak,
        validation=validation,
        notes=(*plan.notes, *notes),
    )


def _dims(shapes: list[Shape]) -> list[Shape]:
    """Return shapes without the bytes of an element, which a Trainer's precision changes."""
    return [shape[:-1] for shape in shapes]
