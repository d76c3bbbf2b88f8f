"""Install the plan of a run in its module, and plan again if memory runs out or a decoder's number of anchors differs.

The plan is made in `setup`, because optimisers do not exist yet. The number of rows of v of a user's decoder
(adapters/adapt.py) is not known then; the plan assumes that of the features' anchors, the smallest possible. If the
first call has more rows, the run plans again before the decoder computes anything, and the new plan's techniques
replace those in the decoder. Loaders, gradients and optimisers depend on the ranks' shards and cannot change any more:
if the new plan would shard something differently, the old choices stay, with a new prediction for the rows of v, and a
note of the plan says so.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_amp.adapters.adapt import adapt
from lightning_amp.costs.rule import Spec
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.installing.install import Installed, install, install_steps
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.checkpoints.stage_parameters import StageParameters
from lightning_amp.lightning.profiling.evaluation_of_module import EvaluationOfModule
from lightning_amp.lightning.profiling.loaders import UNKNOWN
from lightning_amp.lightning.profiling.make_step_plan import without_compiled
from lightning_amp.lightning.steps.cells import count_replicas_once
from lightning_amp.lightning.steps.counted_batches import CountedBatches, run_batches_by
from lightning_amp.lightning.steps.out_of_memory import LEANER, Rescue, largest, rescue_batches
from lightning_amp.lightning.steps.process_memory import watch_process
from lightning_amp.lightning.steps.training_step import TrainingStep
from lightning_amp.lightning.strategy import refusals
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.lightning.strategy.hardware import hold_budget
from lightning_amp.lightning.strategy.larger_batches import LargerBatches
from lightning_amp.lightning.strategy.mesh_strategy import MeshStrategy
from lightning_amp.lightning.strategy.plan_run import resolve_plan
from lightning_amp.lightning.strategy.validation_of_fit import ValidationOfFit, with_validation
from lightning_amp.planning.modules.on_device import with_validation_on
from lightning_amp.planning.modules.plan_decoder import with_rules_beyond
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report, techniques
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.table import (
    OF_BLOCKS,
    STAGED,
    STRATEGIES,
    refuse_combinations,
    stage_search,
    technique_of_steps,
)
from lightning_amp.techniques.technique import function_at


class InstalledPlan:
    """The installed plan of one run, and its changes to the module, until `undo`.

    Args:
        strategy: Receives the plan and each later plan as `plan`, its `predicted_step`, and the steps of a pipeline as
            `pipelined_steps`.
        trained: The plan of the previous run; an evaluation takes its rules for chunks.
    """

    def __init__(
        self, strategy: MeshStrategy, trainer: pl.Trainer, model: nn.Module, *, trained: Plan | None = None
    ) -> None:
        self._request, self._strategy, self._trainer = strategy.request, strategy, trainer
        self._model, self._trained = model, trained
        self._foreign = adapt(model, needed=self._request.may_change_decoders)
        self._installed = Installed()
        self._larger: LargerBatches | None = None
        self._counted: CountedBatches | None = None
        # undone in reverse order: changes are made inside our decoders; a lambda, because `_installed` is replaced
        self._undo: list[Callable[[], None]] = [self._foreign.undo, lambda: self._installed.undo()]

    def install(self) -> Shards:
        """Make the plan and install it. If this raises an AmpError, `undo` removes what was installed before."""
        trainer = self._trainer
        # log_dir is a collective: all ranks must read it, although only rank 0 writes
        self._folder = str(trainer.log_dir or "") if trainer.loggers else ""
        self._facts = PlanningContext(self._strategy, trainer, trained=self._trained)
        plan = resolve_plan(self._facts, notes=self._foreign.notes)
        # of rank 0, which alone has counted a step
        rows = self._foreign.rows()
        if notes := self._foreign.use_rows(self._strategy.broadcast(rows) if rows else rows):
            self._facts.read_again()
            plan = resolve_plan(self._facts, notes=self._foreign.notes)
        plan = replace(plan, notes=(*plan.notes, *notes, *self._foreign.compare(plan)))
        self._keep(plan)
        if self._trainer.state.fn == TrainerFn.FITTING and LargerBatches.are_counted(self._facts, plan):
            self._larger = LargerBatches(
                self._facts, lambda: self._plan, aside=self._aside, exchange=self._change, keep=self._keep
            )
        if not self._request.rescue:
            self._facts.forget_step()
        if self._is_shown(plan):
            refusals.announce(plan, self._request, held=self._holds(plan), report=self._report_path())
        if self._enforces:
            memory = self._facts.memory
            self._undo.append(hold_budget(self._strategy.root_device, memory[self._strategy.global_rank % len(memory)]))
        if self._enforces and self._counts and trainer.state.fn == TrainerFn.FITTING:
            self._undo.append(watch_process(trainer, self._facts.budget))
        # a technique's own steps first: rules are installed around them, and undone before them
        if name := technique_of_steps(plan.strategies):
            self._install_steps(name, plan)
        self._install(plan)
        self._undo.append(count_replicas_once(self._model, self._strategy.mesh))
        # callbacks are checked here, because the replaced modules and buffers are known only now
        refusals.check_callbacks(self._installed, getattr(trainer, "callbacks", ()), plan)
        staged = next((rule.spec for rule in plan.rules if rule.strategy == STAGED), None)
        shards = Shards(self._model, self._installed.sharded, self._installed.partial)
        if staged is not None:
            shards = self._put_stages(plan, staged)
        self._foreign.tell_rows(self.again)
        if self._facts.validation is not None:
            mesh, held = self._strategy.mesh, self._request.refuses and self._holds(plan)
            current, count = lambda: self._plan, self._with_validation
            validation = ValidationOfFit(plan, self._facts, mesh, held=held, current=current, count=count)
            self._undo.append(validation.put())
        return shards

    def _install_steps(self, name: str, plan: Plan) -> None:
        module = self._trainer.lightning_module
        refuse_combinations(plan.strategies)
        if decoders := list(find_decoders(module)):
            raise PlanError(
                f"{name} is not supported: {decoders[0]!r} is a decomposed decoder; use 'nodes', which splits"
                " its anchors over the model axis"
            )
        self._undo.insert(1, install_steps(module, name, plan.spec_of(name), self._strategy.mesh["model"]))

    def _put_stages(self, plan: Plan, spec: Spec) -> Shards:
        """Free what other stages hold, and run the module's steps as stages until these are undone."""
        trainer, mesh = self._trainer, self._strategy.mesh
        refusals.check_run(self._request, trainer, self._model, plan.rules)
        overridden = [(one.fqn, one.module, one.override.run) for one in self._installed.overridden]
        install_stages = function_at(stage_search().install)
        shards: Shards
        shards, steps = install_stages(trainer.lightning_module, overridden, spec, mesh, StageParameters)
        self._undo += [steps.undo, lambda: setattr(self._strategy, "pipelined_steps", None)]
        self._strategy.pipelined_steps = steps
        return shards

    def undo(self) -> None:
        """Restore the modules of the user."""
        while self._undo:
            self._undo.pop()()

    def _with_validation(self, validation: EvaluationOfModule) -> Plan:
        """Count the validation again, for the batch that it has taken, and keep the plan."""
        with self._aside():
            plan = with_validation(self._plan, self._facts, validation)
            self._keep(with_validation_on(plan, self._facts.device), logs=self._plan.validation is None)
        return self._plan

    # --- leaner plans after running out of memory ---

    def rescue(self, step: TrainingStep) -> Callable[[], None]:
        """Let batches run again after running out of memory, if requested, else enforce a budget; return an undo.

        Raises:
            PlanError: A batch of this run cannot run again.
        """
        with ExitStack() as undo:
            self._counted = self._held(step, undo)
            if self._larger is not None:
                # around the others: a batch is counted before it runs
                undo.callback(run_batches_by(self._trainer, self._larger.run))
            return undo.pop_all().close

    def _held(self, step: TrainingStep, undo: ExitStack) -> CountedBatches | None:
        """Let batches run again, if requested or if values decide; else raise an error beyond a budget that is held."""
        ranks, larger = self._strategy.world_size, self._larger
        if self._request.rescue:
            refusals.check_rescue(self._plan, self._trainer, n_ranks=ranks)
            # of rank 0, which alone has profiled the step
            return self._run_again(step, undo, self._leaner, self._strategy.broadcast(self._facts.written), False)
        if not (self._holds(self._plan) and self._request.refuses):
            return None
        if larger and larger.noted and not refusals.why_not_again(self._plan, self._trainer, n_ranks=ranks):
            return self._run_again(step, undo, larger.again, larger.written, True)
        module, why, predicted = self._trainer.lightning_module, self._plan.uncounted, self._strategy.predicted_step
        counted = CountedBatches(module, self._facts.budget, why=why, predicted=predicted)
        undo.callback(run_batches_by(self._trainer, counted.run))
        return counted

    def _run_again(
        self, step: TrainingStep, undo: ExitStack, leaner: Callable[[Any], str], written: Collection[str], holds: bool
    ) -> CountedBatches | None:
        """Let batches that run out of memory run again by a plan that `leaner` installs."""
        rescue = Rescue(
            self._trainer.lightning_module,
            leaner=leaner,
            join=step.join,
            budget=self._facts.budget if self._counts else None,
            device=self._strategy.root_device,
            written=written,
            predicted=self._strategy.predicted_step,
            holds=holds,
        )
        step.before_averaging = rescue.gradients_are_there
        undo.callback(rescue_batches(self._trainer, rescue))
        return rescue.counted

    @property
    def _enforces(self) -> bool:
        """Whether a step beyond the budget ends: not if the user has asked to train anyway."""
        return self._request.refuses or (self._request.rescue and self._request.device_memory is not None)

    @property
    def _counts(self) -> bool:
        """Whether batches can be counted against a budget; only on CPU, because a GPU raises by itself."""
        return self._strategy.root_device.type == "cpu" and self._request.device_memory is not None

    def _holds(self, plan: Plan) -> bool:
        """Whether batches are counted: not without a count of the step, nor for stages (parameters on other ranks), nor
        in compiled graphs, whose buffers no operator makes."""
        hidden = any(STRATEGIES[name].runs_compiled for name in plan.strategies)
        known = plan.diagnosis is not None or plan.fits is None
        return self._counts and not hidden and plan.mesh.model == 1 and known

    def _leaner(self, _: Any = None) -> str:
        """Install a plan that needs less memory, on all ranks; return a description, or "" if there is none."""
        before = self._plan
        # the new plan must keep the budget; if the old one was predicted to, the prediction was too low: require less
        limit = self._facts.budget
        if before.training_bytes <= limit:
            limit = int(LEANER * before.training_bytes)
        found = self._exchange(lambda: self._candidate(limit) if before.strata_bytes else self._with_blocks(limit))
        if found is None:
            return ""
        self._keep(replace(found, policy=before.policy, candidates=before.candidates, budget_bytes=before.budget_bytes))
        return (
            f"{techniques(found.strategies)}, for which {format_bytes(found.predicted_peak_bytes)} are predicted,"
            f" instead of {techniques(before.strategies)} with {format_bytes(before.predicted_peak_bytes)}"
        )

    def _exchange(self, find: Callable[[], Plan]) -> Plan | None:
        """Install what `find` returns, on all ranks or on none; None if it is the plan before, or not possible."""
        before = self._plan
        with _as_in_setup(self._strategy.root_device):
            # the step must be counted without the techniques that are installed
            self._installed.undo()
            self._foreign.stand_in()
            found = None
            try:
                found = find()
                self._install(found)
                refused = found is before
            except AmpError:
                refused = True
            # the plan is equal on all ranks, but installing it may fail on one: then no rank installs it
            if largest(float(refused), self._strategy.root_device):
                self._installed.undo()
                self._foreign.stand_in()
                self._install(before)
                return None
        return found

    def _change(self, plan: Plan, counting: PlanningContext) -> bool:
        """Install the plan of a larger batch, on all ranks or on none, and keep it; return whether it was."""
        if self._exchange(lambda: plan) is None:
            return False
        self._keep(plan, counting, logs=False)
        if self._counted is not None:
            self._counted.begin_again()
        return True

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Restore the module without techniques."""
        with _as_in_setup(self._strategy.root_device), self._installed.aside():
            yield

    def _candidate(self, limit: int) -> Plan:
        """Return the fastest compared plan of a decoder within the limit for these ranks, or raise a PlanError."""
        before = self._plan
        fitting = [
            c
            for c in before.candidates
            if (c.data, c.model) == (before.mesh.data, before.mesh.model) and c.peak_bytes <= limit
        ]
        if not fitting:
            raise PlanError(f"no plan for these ranks needs {format_bytes(limit)} or less")
        names = min(fitting, key=lambda c: c.cell_seconds).strategies
        plan = resolve_plan(self._facts, notes=before.notes, strategies=names or ["S1"], model_ranks=before.mesh.model)
        # requested strategies always contain S1, compared plans for one device never do
        rules = tuple(rule for rule in plan.rules if rule.strategy in names)
        return with_rules_beyond(replace(plan, strategies=names, rules=rules), before)

    def _with_blocks(self, limit: int) -> Plan:
        """Recompute blocks, then also chunk them, until the plan fits the limit; return the plan that needs least."""
        found = before = self._plan
        strategies = without_compiled(before).strategies
        for n in range(1, len(OF_BLOCKS) + 1):
            names = [*strategies, *OF_BLOCKS[:n]]
            try:
                plan = resolve_plan(self._facts.within(limit), notes=before.notes, strategies=names)
            except PlanError:
                continue
            if plan.training_bytes < found.training_bytes:
                found = plan
            if plan.training_bytes <= limit:
                break
        return found

    # --- plans for the actual rows of v ---

    def again(self, rows: str) -> None:
        """Plan again for the actual number of anchors, which `rows` describes; all ranks call it."""
        with _as_in_setup(self._strategy.root_device):
            with self._installed.aside():
                self._foreign.stand_in()
                before = self._plan
                unknown = any(note.startswith(UNKNOWN) for note in before.notes)
                cells = (None, UNKNOWN) if unknown else (before.batch_size, "")
                self._facts = self._facts.for_cells(cells)
                plan = with_rules_beyond(resolve_plan(self._facts, notes=self._foreign.notes), before)
                if _split(plan) != _split(before):
                    note = (
                        f"for the rows that v has the choice would be {','.join(plan.strategies)} on {plan.mesh.data} x"
                        f" {plan.mesh.model} ranks (data x model), which a run that has begun cannot change to; ask for"
                        f" it with strategies and model_parallel_size={plan.mesh.model}"
                    )
                    plan = resolve_plan(self._facts, notes=self._foreign.notes, given=before)
                    plan = replace(plan, notes=(*plan.notes, note))
                notes = f"{rows}: planned anew for these", *self._foreign.compare(plan)
            self._keep(replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes)))))
            refusals.announce(self._plan, self._request, held=self._holds(self._plan), report=self._report_path())
            # only decoders change: the parameters outside belong to optimisers, and the plan shards them as before
            names = list(self._foreign.decoders)
            self._installed.take_out(names)
            self._install(self._plan, within=names)

    # --- shared steps ---

    def _install(self, plan: Plan, *, within: list[str] | None = None) -> None:
        """Install a plan in the module, which must have no installed plan, or only within some of its decoders."""
        refusals.check_compiled(self._model, plan)
        made = install(self._model, self._facts.to_install(plan), self._strategy.mesh, within=within)
        if within is None:
            self._installed = made
        else:
            # parameters of decoders were collected at the first installation
            self._installed.changes += made.changes
        self._foreign.keep(swap.fqn for swap in self._installed.swaps)
        refusals.check_precision(made, self._trainer.precision_plugin, plan)

    def _keep(self, plan: Plan, counting: PlanningContext | None = None, *, logs: bool = True) -> None:
        """Make a plan the current one, write it to the log folder as a report and as JSON, and log its figures once."""
        self._plan = self._strategy.plan = plan
        self._strategy.predicted_step = (counting or self._facts).predicted_step(plan)
        if self._strategy.global_rank != 0 or not self._is_shown(plan):
            return
        if self._folder:
            files, path = get_filesystem(self._folder), self._report_path()
            files.makedirs(self._folder, exist_ok=True)
            texts = {path: plan_report(plan), f"{path.removesuffix('.txt')}.json": plan.to_json()}
            for name, text in texts.items():
                with files.open(name, "w", encoding="utf-8") as file:
                    file.write(f"{text}\n")
        if logs and self._trainer.state.fn == TrainerFn.FITTING:
            figures = {
                "amp_plan": ",".join(plan.strategies),
                "amp_predicted_peak_bytes": plan.predicted_peak_bytes,
                "amp_budget_bytes": plan.budget_bytes,
            }
            for logger in self._trainer.loggers:
                logger.log_hyperparams(figures)

    def _report_path(self) -> str:
        """Return the path of the report, relative to the current folder if possible; "" without a log folder."""
        name = f"amp_plan_{self._plan.evaluates}.txt" if self._plan.evaluates else "amp_plan.txt"
        return f"{self._folder.removeprefix(f'{Path.cwd()}/')}/{name}" if self._folder else ""

    def _is_shown(self, plan: Plan) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING or bool(plan.evaluates)


def _split(plan: Plan) -> tuple[object, ...]:
    """Return the choices that decide how ranks shard parameters and batches."""
    return plan.mesh, plan.axes.placement, plan.axes.features, "S2" in plan.strategies


@contextmanager
def _as_in_setup(device: torch.device) -> Iterator[None]:
    """Restore the autograd and autocast modes of `setup` during a step, and keep the step's random state."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast(device.type, enabled=False),
    ):
        yield
