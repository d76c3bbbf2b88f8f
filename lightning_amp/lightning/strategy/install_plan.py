"""Install the plan of a run in its module; plan again where the anchors differ from those of the features.

In `setup`, where a plan is made because optimisers do not exist yet, nothing tells how many rows the v of a foreign
decoder will have (adapters/adapt.py); its features' anchors are the least. When it is called for the first time with
others, and before it computes anything, the plan is made anew for them, and what it installs in the decoder takes the
place of what was there. What loaders, gradients and optimisers know of the ranks' parts by then cannot change any more:
where the new plan would split something in another way, the old choices stay, with the prediction for the rows of v
that there are, and the plan says so.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.adapters.adapt import adapt
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.installing.install import install
from lightning_amp.installing.installed import Installed
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.profiling.loaders import UNKNOWN
from lightning_amp.lightning.profiling.outside_decoder import keeping_blocks
from lightning_amp.lightning.steps.count_replicas_once import count_replicas_once
from lightning_amp.lightning.steps.out_of_memory import LEANER
from lightning_amp.lightning.steps.rescue import Rescue, largest, refuse_beyond, rescue_batches
from lightning_amp.lightning.steps.training_step import TrainingStep
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.lightning.strategy.hardware import ThisRank
from lightning_amp.lightning.strategy.plan_run import resolve_plan
from lightning_amp.lightning.strategy.refusals import (
    announce,
    check_callbacks,
    check_compiled,
    check_precision,
    check_rescue,
    check_run,
    pipelined,
)
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.lightning.strategy.stepped import install_steps
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report, techniques
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.pipeline.spec import PipelineStages


class InstalledPlan:
    """The plan in force of one run, and what it has installed, until `undo`.

    Args:
        request, here, trainer: What is asked, by which rank, in which run.
        changed: Called with the plan, and with every plan that is made anew, as `plan`, and with its `predicted_step`;
            with the steps of a pipeline as `pipelined_steps`.
        trained: The plan of the run before, of which an evaluation takes over what runs in chunks.
    """

    def __init__(
        self,
        request: Request,
        here: ThisRank,
        trainer: pl.Trainer,
        model: nn.Module,
        *,
        changed: Callable[..., None],
        trained: Plan | None = None,
    ) -> None:
        self._request, self._here, self._trainer = request, here, trainer
        self._model, self._changed, self._trained = model, changed, trained
        self._foreign = adapt(model, needed=request.may_change_decoders)
        self._installed = Installed()
        self._undo: list[Callable[[], None]] = [self._foreign.undo, lambda: self._installed.undo()]

    def install(self) -> Shards:
        """Make the plan and carry it out, or raise an AmpError; what was installed by then is there until `undo`."""
        notes, self._folder = self._foreign.notes, log_folder(self._trainer)
        self._facts = PlanningContext(self._request, self._here, self._trainer, trained=self._trained)
        plan = resolve_plan(self._facts, notes=notes)
        self._keep(replace(plan, notes=(*plan.notes, *self._foreign.compare(plan))))
        if not self._request.rescue:
            self._facts.forget_step()
        if self._is_shown(self._plan):
            self._announce()
        installed = self._installed = self._made(self._plan)
        self._foreign.keep(swap.fqn for swap in installed.swaps)
        check_precision(installed, self._trainer.precision_plugin, self._plan)
        self._undo.append(count_replicas_once(self._model, self._mesh))
        check_callbacks(installed, getattr(self._trainer, "callbacks", ()), self._plan)
        self._undo.append(install_steps(self._trainer.lightning_module, self._plan, self._mesh))
        shards = self._staged() or Shards(self._model, installed.sharded, installed.partial)
        self._foreign.tell_rows(self.again)
        return shards

    def _staged(self) -> Shards | None:
        """The parameters of the stages of a pipeline, whose steps take the place of the module's; None without one."""
        spec = next((rule.spec for rule in self._plan.rules if isinstance(rule.spec, PipelineStages)), None)
        if spec is None:
            return None
        check_run(self._request, self._trainer, self._model, self._plan.rules)
        parameters, steps = pipelined(self._trainer.lightning_module, self._installed, spec, self._mesh)
        self._undo += [steps.undo, lambda: self._changed(pipelined_steps=None)]
        self._changed(pipelined_steps=steps)
        return parameters

    def switch(self, strategies: tuple[str, ...]) -> None:
        """Put the modules of another plan in the place of those that are installed; all ranks call it between steps.

        Raises:
            PlanError: A technique refuses a module on some rank; what was installed still is, on all of them.
        """
        before, refused, made = self._plan, "", Installed()
        with _as_in_setup(self._here.device):
            self._foreign.stand_in()
            names = list(find_decoders(self._model))
            taken = self._installed.take_out(names)
            try:
                plan = self._plan_of(strategies)
                made = self._made(plan, within=names)
                assert {*map(id, made.partial)} <= {*map(id, self._installed.partial)}, (
                    "as the plan of the run"
                )
                assert not made.sharded, "what is sharded lies outside of decoders"
                check_precision(made, self._trainer.precision_plugin, plan)
            except AmpError as error:
                refused = str(error)
            # no collective above is called by some ranks only: a plan that cannot be made is refused on all of them
            on_some_rank = bool(largest(float(bool(refused)), self._here.device))
            if on_some_rank:
                made.undo()
                self._installed.put_back(taken)
            self._installed.add(made)
            self._foreign.keep(swap.fqn for swap in self._installed.swaps)
        if on_some_rank:
            raise PlanError(refused or "refused on another rank")
        self._keep(replace(plan, policy=before.policy, candidates=before.candidates, notes=before.notes))

    def rescue(self, step: TrainingStep) -> Callable[[], None]:
        """Let batches run again where memory ends, if that was requested, else hold a budget; returns what ends it.

        Raises:
            PlanError: A batch of this run cannot run again.
        """
        if not self._request.rescue:
            held = self._holds(self._plan) and self._request.if_unfit == "refuse"
            why = self._plan.uncounted
            return refuse_beyond(self._facts.budget, self._trainer, why=why) if held else lambda: None
        module = self._trainer.lightning_module
        check_rescue(self._plan, self._trainer, n_ranks=self._here.n_ranks)
        rescue = Rescue(
            module,
            leaner=self._leaner,
            budget=self._facts.budget if self._counts else None,
            device=self._here.device,
        )
        step.before_averaging = rescue.gradients_are_there
        return rescue_batches(self._trainer, rescue)

    @property
    def _counts(self) -> bool:
        """Whether batches can be counted against a budget: a GPU says by itself where its memory ends."""
        return self._here.device.type == "cpu" and self._request.device_memory is not None

    def _holds(self, plan: Plan) -> bool:
        """Whether those of a plan are: of a decoder the prediction leaves things out, and a stage's module has
        parameters that are elsewhere.
        """
        return self._counts and plan.mesh.model == 1 and (plan.diagnosis is not None or plan.fits is None)

    def _leaner(self) -> str:
        """Install a plan that needs less; all ranks. Returns what it is, "" where there is none."""
        before = self._plan
        # a plan that was known to exceed the budget shall keep it; one that was said to fit was said wrongly
        limit = self._facts.budget
        if before.predicted_peak_bytes <= limit:
            limit = int(LEANER * before.predicted_peak_bytes)
        try:
            if before.diagnosis is None:
                self.switch(self._leaner_strategies(limit))
            else:
                self._keep_less(limit)
        except AmpError:
            return ""
        peak = format_bytes(self._plan.predicted_peak_bytes)
        return (
            f"{techniques(self._plan.strategies)}, for which {peak} are predicted, instead of"
            f" {techniques(before.strategies)} with {format_bytes(before.predicted_peak_bytes)}"
        )

    def _leaner_strategies(self, limit: int) -> tuple[str, ...]:
        """Of the candidates for the same ranks, the fastest within a limit."""
        fitting = [
            c
            for c in self._plan.candidates
            if (c.data, c.model) == (self._plan.mesh.data, self._plan.mesh.model) and c.peak_bytes <= limit
        ]
        if not fitting:
            raise PlanError(f"no plan for these ranks needs {format_bytes(limit)} or less")
        return min(fitting, key=lambda c: c.cell_seconds).strategies

    def _keep_less(self, limit: int) -> None:
        """Of any module, recompute what it takes to stay within a limit; where that is not enough, chunk too."""
        before = self._plan
        with _as_in_setup(self._here.device):
            # a step is counted of the module as it is, not of blocks that are computed again already
            self._installed.undo()
            try:
                plan = min(
                    self._leaner_blocks(limit), key=lambda plan: plan.predicted_peak_bytes, default=before
                )
                if plan.predicted_peak_bytes >= before.predicted_peak_bytes:
                    raise PlanError("no choice of recomputed blocks, nor of chunks in them, needs less")
                self._installed = self._made(plan)
            except AmpError:
                self._installed = self._made(before)
                raise
        self._keep(
            replace(
                plan, policy=before.policy, candidates=before.candidates, budget_bytes=before.budget_bytes
            )
        )

    def _leaner_blocks(self, limit: int) -> Iterator[Plan]:
        """The first that stays within the limit is the last."""
        for more in (("recompute",), ("recompute", "chunk")):
            names = [*self._plan.strategies, *more]
            try:
                plan = resolve_plan(self._facts.within(limit), notes=self._plan.notes, strategies=names)
            except PlanError:
                continue
            yield plan
            if plan.predicted_peak_bytes <= limit:
                return

    def _plan_of(self, strategies: tuple[str, ...]) -> Plan:
        plan = resolve_plan(
            self._facts,
            notes=self._foreign.notes,
            strategies=strategies or ["S1"],
            model_ranks=self._plan.mesh.model,
        )
        # what is requested has S1 always, what is compared on one device never
        rules = tuple(rule for rule in plan.rules if rule.strategy in strategies)
        return replace(plan, strategies=strategies, rules=rules)

    def undo(self) -> None:
        """Put the modules back that were there before."""
        while self._undo:
            self._undo.pop()()

    @property
    def _mesh(self) -> DeviceMesh:
        return self._here.mesh_of(self._plan.mesh.model)

    def _keep(self, plan: Plan) -> None:
        self._plan = plan
        self._changed(plan=plan, predicted_step=self._facts.predicted_step(plan))
        if self._here.rank == 0 and self._is_shown(plan):
            if self._folder:
                write_plan(self._folder, plan)
            if self._trainer.state.fn == TrainerFn.FITTING:
                log_plan(self._trainer.loggers, plan)

    def _is_shown(self, plan: Plan) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING or bool(plan.evaluates)

    def _announce(self) -> None:
        plan = self._plan
        report = report_path(self._folder, plan)
        announce(plan, self._request, held=self._holds(plan), report=report)

    def again(self, rows: str) -> None:
        """Plan anew, now that a decoder knows how many anchors it has, as `rows` says; all ranks call it."""
        with _as_in_setup(self._here.device):
            with self._installed.aside():
                self._foreign.stand_in()
                plan = self._plan_again()
                notes = f"{rows}: planned anew for these", *self._foreign.compare(plan)
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))
            self._keep(plan)
            self._announce()
            self._renew(plan)

    def _plan_again(self) -> Plan:
        before, notes = self._plan, self._foreign.notes
        unknown = any(note.startswith(UNKNOWN) for note in before.notes)
        cells = (None, UNKNOWN) if unknown else (before.batch_size, "")
        self._facts = PlanningContext(self._request, self._here, self._trainer, cells=cells)
        plan_again = partial(resolve_plan, self._facts, notes=notes)
        wanted = keeping_blocks(plan_again(), before)
        if _split(wanted) == _split(before):
            return wanted
        kept = plan_again(given=before)
        note = (
            f"for the rows that v has the choice would be {','.join(wanted.strategies)} on {wanted.mesh.data} x"
            f" {wanted.mesh.model} ranks (data x model), which a run that has begun cannot change to; ask for it with"
            f" strategies and model_parallel_size={wanted.mesh.model}"
        )
        return replace(kept, notes=(*kept.notes, note))

    def _renew(self, plan: Plan) -> None:
        """Install anew what lies in the decoders; all else is what optimisers know, and the same."""
        names = list(self._foreign.decoders)
        self._installed.take_out(names)
        self._installed.add(self._made(plan, within=names))
        self._foreign.keep(swap.fqn for swap in self._installed.swaps)

    def _made(self, plan: Plan, *, within: list[str] | None = None) -> Installed:
        check_compiled(self._model, plan)
        return install(self._model, plan, self._mesh, within=within)


def _split(plan: Plan) -> tuple[object, ...]:
    """What ranks have parts of."""
    return plan.mesh, plan.axes.placement, plan.axes.features, "S2" in plan.strategies


@contextmanager
def _as_in_setup(device: torch.device) -> Iterator[None]:
    """Inside of a step, what planning probes is as it was before the step, and draws no numbers of it."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def log_folder(trainer: pl.Trainer) -> str:
    """The folder of a run's logs; "" without a logger that writes files. A collective."""
    return str(trainer.log_dir or "") if trainer.loggers else ""


def report_path(folder: str, plan: Plan) -> str:
    """The file of the report, as short as the current folder allows; "" without a folder."""
    name = f"amp_plan_{plan.evaluates}.txt" if plan.evaluates else "amp_plan.txt"
    return f"{folder.removeprefix(f'{Path.cwd()}/')}/{name}" if folder else ""


def write_plan(folder: str, plan: Plan) -> None:
    """Write the report and the JSON with the same name; rank 0 calls it."""
    files = get_filesystem(folder)
    files.makedirs(folder, exist_ok=True)
    path = report_path(folder, plan)
    for name, text in ((path, plan_report(plan)), (f"{path.removesuffix('.txt')}.json", plan.to_json())):
        with files.open(name, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")


def log_plan(loggers: Iterable[Logger], plan: Plan) -> None:
    """Add the techniques, the predicted peak and the budget to the hyperparameters; rank 0 calls it."""
    figures = {
        "amp_plan": ",".join(plan.strategies),
        "amp_predicted_peak_bytes": plan.predicted_peak_bytes,
        "amp_budget_bytes": plan.budget_bytes,
    }
    for logger in loggers:
        logger.log_hyperparams(figures)
