"""Hold the validation of a fit, and its sanity check, within the budget: predicted with the plan, run in its chunks.

    before training    counted with the first batch of its loader, beside what training keeps between steps
    in its first batch counted then, if its loader cannot be read ahead, such as an iterator
    before a batch     counted if it is larger than those before and may exceed the budget, of a run of one rank; its
                       chunks are chosen anew if it needs them
    while it runs      its first batches, and larger ones, are counted against a budget that was named (CPU only)

Known limits: on several ranks larger batches are counted only while they run; a validation under tensor3d, or with
blocks on other ranks, is not counted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_amp.errors import AmpError, DataError, DoesNotFitError
from lightning_amp.footprint.module_profile import GRADIENTS, HELD
from lightning_amp.installing.install import Installed, install_rules
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.evaluation_of_module import EvaluationOfModule
from lightning_amp.lightning.steps.counted_batches import CountedBatches, run_validation_by
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.reports.plan_report import shortfall
from lightning_amp.techniques.table import STRATEGIES, technique_of_steps

NOT_COUNTED = "the validation is not a part of the predicted peak"
BY_VALUES = "the validation was counted for some batches, whose values decide shapes or branches"
UNCOUNTED = "it is not counted: give it no longer batches than training; on a CPU a budget that was named is held in it"
LATER = f"{NOT_COUNTED} yet, and is counted when its first batch comes"


def with_validation(plan: Plan, facts: PlanningContext, found: EvaluationOfModule | None = None) -> Plan:
    """Return a fit's plan with the prediction of its validation; a note says why it has none."""
    found = found or facts.validation
    if found is None or plan.fits is False:
        return plan
    elsewhere = [name for name in plan.strategies if STRATEGIES[name].data_axis]
    name = technique_of_steps(plan.strategies)
    row = STRATEGIES[elsewhere[0]] if elsewhere else None
    try:
        if name and not elsewhere:
            steps = DrySteps(name, plan.spec_of(name), plan.mesh.model, run_ranks=plan.mesh.ranks)
            undo = steps.put(facts.trainer.lightning_module)
            try:
                return _counted(found, plan, facts, no_chunks=f"{name} has steps of its own")
            finally:
                undo()
        if plan.mesh.model > 1 or (row is not None and row.validation is None):
            split = elsewhere[0] if elsewhere else next(name for name in plan.strategies if name != "S1")
            return _noting(plan, f"{NOT_COUNTED}: with {split} {UNCOUNTED}")
        step = facts.profiled[0]
        if row is not None and row.validation is not None and step is not None:
            ranks, bytes_of = plan.mesh.data, partial(row.validation, step, plan.spec_of(elsewhere[0]))
            plan = found.sharded(plan, lambda validation: bytes_of(validation, ranks))
            return _with_note_on_values(plan, found)
        return _counted(found, plan, facts)
    except DataError as error:
        return _noting(plan, f"{LATER}: {error}" if facts.strategy.world_size == 1 else f"{NOT_COUNTED}: {error}")
    except AmpError as error:
        return _noting(plan, f"{NOT_COUNTED}: {error}")


def _counted(found: EvaluationOfModule, plan: Plan, facts: PlanningContext, *, no_chunks: str = "") -> Plan:
    kept = _kept_bytes(plan, facts)
    return _with_note_on_values(found.beside_training(plan, kept, facts.rates[0], no_chunks=no_chunks), found)


def _with_note_on_values(plan: Plan, found: EvaluationOfModule) -> Plan:
    """Add that values decide what a validation batch takes."""
    note = f"{BY_VALUES}; another batch can take more: {found.counter.noted}"
    others = [one for one in plan.notes if not one.startswith(BY_VALUES)]
    return replace(plan, notes=(*others, Explanation(note))) if found.counter.noted else plan


def _noting(plan: Plan, note: str) -> Plan:
    notes = [one for one in plan.notes if not one.startswith(NOT_COUNTED)]
    return replace(plan, notes=(*notes, note))


def _kept_bytes(plan: Plan, facts: PlanningContext) -> int:
    """Return what training keeps for the next step, without gradients, which Lightning sets to None before."""
    seen = facts.profiled[0]
    if seen is None:
        return plan.predicted_base_bytes
    keeps = is_overridden("on_validation_model_zero_grad", facts.trainer.lightning_module)
    kinds = [kind for kind in HELD if keeps or kind != GRADIENTS]
    return sum(seen.profile.timeline[-1].by_kind[kind] for kind in kinds)


class ValidationOfFit:
    """The validation batches of a fit, which run in the chunks of the plan, and are counted.

    Args:
        facts: What the plan was made with, and its validation.
        held: Whether the named budget is held while batches run.
        current: Returns the plan of the run, which may have changed.
        count: Function that returns the plan with the validation counted again, for the batch that it has taken.
    """

    def __init__(
        self,
        plan: Plan,
        facts: PlanningContext,
        mesh: Any,
        *,
        held: bool,
        current: Callable[[], Plan],
        count: Callable[[EvaluationOfModule], Plan],
    ) -> None:
        assert facts.validation is not None, "there is a validation"
        self._trainer, self._mesh, self._refuses, self._count = facts.trainer, mesh, facts.request.refuses, count
        self._validation, self._current = facts.validation, current
        self._waits = any(note.startswith(LATER) for note in plan.notes)
        self._alone = facts.strategy.world_size == 1
        budget = plan.budget_bytes if held else None
        self._counted = None if budget is None else CountedBatches(facts.trainer.lightning_module, budget, trains=False)
        self._note_values(plan)
        self._installed = Installed()
        self._install(plan)

    def put(self) -> Callable[[], None]:
        """Let the Trainer run validation batches by this object; return an undo."""
        return run_validation_by(self._trainer, self._run)

    def _install(self, plan: Plan) -> None:
        if plan.validation is not None and plan.validation.rules:
            self._installed = install_rules(self._trainer.lightning_module, plan.validation.rules, self._mesh)
            for change in self._installed.changes:
                change.take()

    def _note_values(self, plan: Plan) -> None:
        """Count every batch from now on if values decide what a batch takes."""
        if self._counted is not None and any(note.startswith(BY_VALUES) for note in plan.notes):
            self._counted.noted = True

    def _run(self, plain: Callable[..., Any], *args: Any) -> Any:
        batch, number, loader = args[:3]
        if self._waits:
            self._waits = False
            self._validation.take_late(batch)
            self._count_again("It was counted with its first batch, which could not be read before")
        elif self._may_exceed(loader, batch):
            of = f" of loader {loader}" if loader else ""
            with self._validation.taking_larger(loader, batch):
                self._count_again(f"It was counted with batch {number}{of}, which is larger than those before")
        counted = nullcontext() if self._counted is None else self._counted.counting(args)
        with self._in_chunks(), counted:
            return plain(*args)

    def _may_exceed(self, loader: int, batch: Any) -> bool:
        plan = self._current()
        known, budget = plan.validation, plan.budget_bytes
        if not self._alone or known is None or budget is None or plan.fits is False:
            return False
        return self._validation.is_larger(loader, batch, known.peak_bytes, budget)

    def _count_again(self, which: str) -> None:
        """Count the validation with another batch; all that was said about the plan before it holds without."""
        before = self._current()
        plan = self._count(self._validation)
        self._note_values(plan)
        if plan.validation is not None and (
            before.validation is None or before.validation.rules != plan.validation.rules
        ):
            # the earlier changes are out between batches
            self._installed = Installed()
            self._install(plan)
        for note in plan.notes:
            if note.startswith(NOT_COUNTED) and note not in before.notes:
                rank_zero_warn(f"{note}. {which}")
        if plan.fits is False:
            said = f"{shortfall(plan)}. {which}"
            if self._refuses:
                raise DoesNotFitError(f"{said}; AMPStrategy(on_predicted_oom='warn') runs it anyway")
            rank_zero_warn(said)

    @contextmanager
    def _in_chunks(self) -> Iterator[None]:
        for change in self._installed.changes:
            change.put()
        try:
            yield
        finally:
            for change in reversed(self._installed.changes):
                change.take()
