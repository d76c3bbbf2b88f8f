"""Collect the planner inputs of one run: data, profiled step, device rates, budget and speeds, equal on all ranks."""

import copy
import fnmatch
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.costs import model_shape
from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.ordered_runs import speeds_of_ranks
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.data.batch import datamodule_of
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.errors import AmpError, PlanError, ShardError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.evaluation_of_module import EvaluationOfModule
from lightning_amp.lightning.profiling.loaders import CellsOrReason, cells_per_step, steps_of_run
from lightning_amp.lightning.profiling.make_step_plan import without_compiled
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.strategy.hardware import (
    allocator_settings,
    host_room,
    least_budget,
    measured_speeds,
    memory_beside,
)
from lightning_amp.lightning.strategy.mesh_strategy import MeshStrategy
from lightning_amp.lightning.strategy.refusals import without_stages
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.models.glue import GLUE
from lightning_amp.planning.base.plan_request import PlanRequest, StepRequest, compile_option
from lightning_amp.planning.modules.on_device import Device
from lightning_amp.planning.modules.plan_module import counted_rules
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile as read_profile
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.host_memory.limit import host_memory_of, within
from lightning_amp.techniques.rates_of import rates_of
from lightning_amp.techniques.table import EVALUATED, STRATEGIES, parse_strategies, technique_of_steps

SHOWN = 8
"""Largest number of differences in an error message."""
OF_THE_MACHINE = ("data_dir", "budget_bytes")
COMPARED = (
    *("policy", "strategies", "model_parallel_size", "share_batch_statistics", "balance_cells"),
    *("blocks", "fsdp_ranks", "fsdp_offload", "host_memory", "device_speeds", "compile"),
)


class PlanningContext:
    """The planner inputs of one run, computed for the first plan on rank 0 and cached for later plans.

    Args:
        cells: Result of `cells_per_step`; None calls it here, on all ranks.
        trained: The plan of the previous run.
    """

    def __init__(
        self,
        strategy: MeshStrategy,
        trainer: pl.Trainer,
        *,
        cells: CellsOrReason | None = None,
        trained: Plan | None = None,
    ) -> None:
        self.request, self.strategy, self.trainer = strategy.request, strategy, trainer
        request = self.request
        self._cells, self._compared = cells_per_step(trainer) if cells is None else cells, cells is not None
        bounded = request.device_memory is not None and request.refuses
        limit = self.budget if bounded else None
        fits = trainer.state.fn == TrainerFn.FITTING
        self.steps = self._dry_steps(None if fits else trained)
        has_decoder = bool(find_decoders(trainer.lightning_module))
        # a decoder refuses steps that replace the module's when they are installed
        self.step = StepOfModule.of(trainer, limit_bytes=limit, steps=None if has_decoder else self.steps)
        self.counts_decoder = has_decoder and self.step is not None and cells is None
        """Whether the step of a module with a decoder is counted; those of later plans of a run are not."""
        before = () if trained is None or fits else trained.rules
        # the evaluated module may differ from the trained one
        names = [name for name, _ in trainer.lightning_module.named_modules()]
        self.in_chunks = tuple(
            rule for rule in before if rule.strategy == EVALUATED and fnmatch.filter(names, rule.fqn)
        )
        """Rules of the previous fit's plan by which an evaluation runs in chunks."""
        budgeted = request.device_memory is not None and not self.in_chunks
        # without a budget, steps whose split is open are counted to choose it
        evaluates = budgeted or (self.steps is not None and not self.steps.chosen)
        self.evaluation = EvaluationOfModule.of(trainer) if evaluates else None
        matters = request.device_memory is not None or strategy.root_device.type == "cuda"
        validates = fits and matters and (self.counts_decoder or not has_decoder)
        self.validation = EvaluationOfModule.of_fit(trainer) if validates else None
        self.steps_of_run = steps_of_run(trainer) if fits and request.compile == "auto" else inf
        """Training steps, at most."""

    def _dry_steps(self, trained: Plan | None) -> DrySteps | None:
        """Return the requested technique with its own steps, or that of the previous fit's plan, to profile it."""
        request, strategy = self.request, self.strategy
        plan = request.given_plan or trained
        if plan is not None and (name := technique_of_steps(plan.strategies)):
            return DrySteps(name, plan.spec_of(name), plan.mesh.model, run_ranks=strategy.world_size)
        strategies = parse_strategies(request.strategies or "S1")
        if not technique_of_steps(strategies):
            return None
        size = request.model_parallel_size
        ranks = strategy.num_processes if size == "auto" else size
        return DrySteps.of_request(strategies, request, ranks, run_ranks=strategy.world_size, budget=self.budget)

    @property
    def data(self) -> SingleCellDataModule | None:
        """The data module if it is a SingleCellDataModule; in others these attributes may have another meaning."""
        found = datamodule_of(self.trainer)
        return found if isinstance(found, SingleCellDataModule) else None

    @cached_property
    def read(self) -> tuple[Profile, model_shape.ModelShape, list[str]]:
        """Profile and shape of the run, and notes on what the prediction leaves out."""
        request, trainer, seen, why = self.request, self.trainer, self.profiled[0], self.not_profiled
        batch_size, unknown = self._cells
        if seen is not None:
            batch_size = seen.profile.batch_size or batch_size or 1
        elif batch_size is None and self.counts_decoder and self.step is not None:
            batch_size = self.step.rows(self.rates[0])
        notes = [note for note in (unknown if batch_size is None else "", why) if note]
        notes += [] if seen is not None or self.counts_decoder else self.notes_on_closed_forms
        profile, shape, more = read_shape(
            trainer.lightning_module,
            self.data,
            data_dir=request.data_dir,
            batch_size=batch_size or 1,
            queries=request.chunk_queries,
            rates=self.rates[0],
        )
        return profile, replace(shape, profiled=seen is not None), [*notes, *more]

    @property
    def notes_on_closed_forms(self) -> list[str]:
        """What a prediction that is not counted assumes."""
        notes, precision = list[str](), self.trainer.precision
        if "mixed" in str(precision):
            notes.append(f"predicted without precision={precision!r}, which keeps some tensors in half the bytes")
        if not isinstance(self.trainer.lightning_module, GLUE):
            notes.append(
                "of the activations outside the decoder the counts and the inputs of layers that read them all are"
                " predicted: the others are those of another's model"
            )
            notes.append("the optimiser state is counted as Adam's, twice the weights, for there are no optimisers yet")
        return notes

    @cached_property
    def profiled(self) -> tuple[ProfiledStep | None, str]:
        """The profiled step, or None, and the reason if it cannot be profiled; with a decoder None before the plan."""
        if self.step is None or self.step.decoders:
            return None, ""
        try:
            found = self.step.profiled(self.rates[0], self._request_of_step)
            return without_stages(found, self.strategy.root_device, self.request, self.trainer), ""
        except PlanError:
            # the step had to run with real values, which needs too much memory
            raise
        except AmpError as error:
            if isinstance(error.__cause__, ShardError):
                # the step has an operator without a sharding rule, which would fail in training too
                raise error.__cause__ from None
            return None, str(error)

    @property
    def _request_of_step(self) -> StepRequest:
        return StepRequest(
            requested=self.request.specs,
            host_memory=host_memory_of(self.request),
            host_room=self.host_room,
            shared_statistics=self.strategy.world_size > 1 and self.request.share_batch_statistics,
        )

    def inputs(self, strategies: Sequence[str] | None = None, model_ranks: int | None = None) -> PlanRequest:
        """Return what decides the plan, with these strategies and ranks of the model axis instead of the requested."""
        request, (data, shape, notes), (rates, note) = self.request, self.read, self.rates
        chosen = request.strategies if strategies is None else strategies
        names = None if chosen is None else parse_strategies(chosen if isinstance(chosen, str) else list(chosen))
        # after a fit whose policy chose a grid, an evaluation has full parameters and no grid
        grid = None if names is None else self.grid_ranks
        return PlanRequest(
            data=data,
            shape=shape,
            rates=rates,
            devices=self.strategy.world_size,
            node_devices=self.strategy.num_processes,
            memory=self.memory,
            memory_named=request.device_memory is not None,
            policy=request.policy,
            strategies=names,
            model_parallel_size=(grid or request.model_parallel_size) if model_ranks is None else model_ranks,
            micro_batches=request.micro_batches,
            speeds=self.speeds,
            steps=self.steps,
            compile=compile_option(request.compile, chooses=request.chooses),
            steps_of_run=self.steps_of_run,
            notes=(*note, *notes),
            **vars(self._request_of_step),
        )

    def keep_profiled(self, seen: ProfiledStep | None) -> None:
        """Keep the step that a plan of a module with a decoder was made for as the profiled one."""
        self.profiled = seen, ""

    @property
    def written(self) -> frozenset[str]:
        """Parameters that the profiled step changes before its update, and "batch" if it changes the batch."""
        profiled = self.strategy.global_rank == 0 and self.step is not None and self.profiled[0] is not None
        return self.step.step().written if profiled and self.step is not None else frozenset()

    @property
    def not_profiled(self) -> str:
        """Why the peak is not known; "" if the step was profiled or the module has a decoder."""
        return self.profiled[1] and f"the step was not profiled, and its peak is not known: {self.profiled[1]}"

    @cached_property
    def rates(self) -> tuple[Rates, list[str]]:
        """Rates of the device, and a note if they are not known."""
        if self.request.rates is not None:
            found, note = Rates.read(self.request.rates), ""
        else:
            found, note = rates_of(self.strategy.root_device, str(self.trainer.precision))
        # launch costs depend on the device of this run, not on the device of the file
        found = replace(found, launches=self.strategy.root_device.type != "cpu")
        return found.on_nodes_of(self.strategy.num_processes), [note] if note else []

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of tensors on each device; one number if all are equal, or not named: then first access is collective.

        Raises:
            PlanError: A named budget leaves nothing to tensors.
        """
        run = self.strategy
        if self.device is not None:
            return self.device.tensor_bytes(run.world_size)
        if self.request.device_memory is not None:
            return memory_of_ranks(self.request.device_memory, run.world_size)
        return (least_budget(run.root_device, node_ranks=run.num_processes, n_ranks=run.world_size),)

    @cached_property
    def device(self) -> Device | None:
        """The GPU, and what a process may take of it; None on a CPU. The first access is collective, as of `memory`."""
        run, named = self.strategy, self.request.device_memory
        memory = memory_beside(run.root_device, self.rates[0])
        if memory is None:
            return None
        if named is None:
            free = least_budget(run.root_device, node_ranks=run.num_processes, n_ranks=run.world_size)
            # the context of this process is not free any more; NCCL's buffers may be free yet
            budgets: tuple[int, ...] = (free + memory.context_bytes,)
        else:
            budgets = memory_of_ranks(named, run.world_size)
        return Device(memory=memory, budgets=budgets, settings=allocator_settings())

    @cached_property
    def host_room(self) -> int:
        """Bytes of host memory that are free for each rank; decided once in a run. The first access is collective."""
        run, module = self.strategy, self.trainer.lightning_module
        return host_room(run.root_device, module, node_ranks=run.num_processes, n_ranks=run.world_size)

    def for_cells(self, cells: CellsOrReason) -> "PlanningContext":
        """Return the inputs for another number of cells; what a run that has begun takes of the host is its own."""
        found = PlanningContext(self.strategy, self.trainer, cells=cells)
        vars(found)["host_room"] = self.host_room
        return found

    @property
    def budget(self) -> int:
        """Bytes of the smallest device."""
        return min(self.memory)

    @property
    def grid_ranks(self) -> int | None:
        """Number of ranks of a grid technique, which the technique may have chosen; None without a grid."""
        if self.steps is None or not STRATEGIES[self.steps.name].data_axis:
            return None
        return self.steps.ranks

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Speeds of all ranks relative to the fastest; empty if they count as equal. The first access is collective."""
        requested, ranks = self.request.device_speeds, self.strategy.world_size
        if requested == "measure":
            return measured_speeds(self.strategy.root_device, ranks)
        return speeds_of_ranks(requested, ranks)

    def within(self, n_bytes: int) -> "PlanningContext":
        """Return a copy with a budget of `n_bytes` for tensors."""
        fewer = copy.copy(self)
        fewer.request = replace(self.request, device_memory=f"{n_bytes}B")
        # of the cached values, only `memory` depends on it, and has bytes of tensors
        vars(fewer)["memory"] = (n_bytes,)
        return fewer

    def read_again(self) -> None:
        """Read the module's shape and step again for the next plan, for it has changed."""
        for name in ("read", "profiled"):
            vars(self).pop(name, None)

    def to_install(self, plan: Plan) -> Plan:
        """Return a plan for an installation: rules without a bound for the host may take what is free there."""
        return replace(plan, rules=within(plan.rules, self.host_room))

    def predicted_step(self, plan: Plan) -> ModuleProfile | None:
        """Return the profile of a plan's step; None if a technique's bytes come from closed forms, not a count.

        Over a model axis None too: the count is that of the fullest rank, which may be another one.
        """
        rules = tuple(rule for rule in without_compiled(plan).rules if rule.strategy != "S1")
        if self.step is None or plan.mesh.model > 1 or counted_rules(plan) != rules:
            return None
        return self.step.profile_with(rules)

    def forget_step(self) -> None:
        """Free the batch that the step was profiled with; the profile is kept."""
        if self.step is not None:
            self.step.forget()
        self.step = None

    def compare(self) -> None:
        """Compare all facts that decide the plan with those of rank 0, once in a run; a collective.

        Paths, memory and rates are not compared, because machines may differ in them, nor is the batch size, because
        ranks may have unequal numbers of cells; rank 0's counts. Differences raise the same PlanError on all ranks.
        """
        n_ranks = self.strategy.world_size
        if self._compared or n_ranks == 1:
            return
        everyones: list[Any] = [None] * n_ranks
        # gathered by all ranks, not sent to rank 0: so all of them raise
        dist.all_gather_object(everyones, _facts_of_plan(self.request, self.data))
        first, differing = everyones[0], list[tuple[int, list[str]]]()
        for rank, facts in enumerate(everyones):
            lines = [
                f"{name} is {first.get(name, 'missing')} on rank 0 and {facts.get(name, 'missing')} on rank {rank}"
                for name in sorted({*first, *facts})
                if first.get(name) != facts.get(name)
            ]
            differing += [(rank, lines)] if lines else []
        if differing:
            other, lines = differing[0]
            more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
            raise PlanError(
                f"the same plan is needed on all {n_ranks} ranks, and {len(differing)} of them see something else than"
                f" rank 0, first rank {other}: {'; '.join(lines[:SHOWN])}{more}. Give all ranks the same options and"
                " the same data"
            )
        self._compared = True


def _facts_of_plan(request: Request, data: Any) -> dict[str, str]:
    """Return all facts that decide the plan on this rank, by name; `data` is the data module or None."""
    found: dict[str, Any] = {name: getattr(request, name) for name in COMPARED}
    try:
        if (plan := request.given_plan) is not None:
            found["plan"] = json.loads(plan.to_json())
        if (data_dir := request.data_dir_or(data)) is not None:
            read = read_profile(data_dir, setting=getattr(data, "setting", None))
            graph = read.graph and asdict(read.graph)
            found["data"] = {"modality": {m.name: asdict(m) for m in read.modalities}, "graph": graph}
    except AmpError as error:
        # not raised here, because the other ranks wait in the collective
        found["error"] = str(error)
    return {name: value for name, value in _flat(found) if name.rpartition(".")[2] not in OF_THE_MACHINE}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, repr(value)
