"""Collect the planner inputs of one run: data, profiled step, device rates, budget and speeds, equal on all ranks."""

import copy
import fnmatch
import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.costs import model_shape
from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.data.batch import datamodule_of
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.errors import AmpError, PlanError, ShardError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.installing.describe_module import describe, unpredicted, with_unsupported
from lightning_amp.lightning.profiling.blocks_outside import step_beside_decoder
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.evaluation_of_module import EvaluationOfModule
from lightning_amp.lightning.profiling.loaders import CellsOrReason, cells_per_step
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.strategy.hardware import allocator_settings, least_budget, measured_speeds, memory_beside
from lightning_amp.lightning.strategy.mesh_strategy import MeshStrategy
from lightning_amp.lightning.strategy.refusals import without_stages
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.models.glue import GLUE
from lightning_amp.planning.modules.on_device import OF_DECODER, Device
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.time.step_seconds import on_device
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile as read_profile
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.rates_of import rates_of
from lightning_amp.techniques.table import (
    EVALUATED,
    PREDICTIONS,
    STRATEGIES,
    of_blocks_outside,
    parse_strategies,
    technique_of_steps,
)

ADAM_SLOTS = 2
"""Optimiser values per weight, assumed for modules other than the reference model: optimisers do not exist yet."""
RMSPROP_SLOTS = 1
SHOWN = 8
"""Largest number of differences in an error message."""
OF_THE_MACHINE = ("data_dir", "budget_bytes")
COMPARED = (
    *("policy", "strategies", "model_parallel_size", "share_batch_statistics", "balance_cells"),
    *("blocks", "fsdp_ranks", "fsdp_offload", "host_memory", "device_speeds"),
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
        self.step = StepOfModule.of(trainer, limit_bytes=limit, steps=self.steps)
        ids = () if request.strategies is None else parse_strategies(request.strategies)
        self.blocks_outside = of_blocks_outside(ids)
        """Requested techniques of blocks outside a decoder, if there is a decoder."""
        self.step_outside_decoder: StepOfModule | None = None
        """Step of a module with a decoder, to plan blocks outside it, as requested or for a budget."""
        if self.blocks_outside:
            self.step_outside_decoder = StepOfModule.of(trainer, decoder=True, limit_bytes=limit)
        elif request.chooses and request.device_memory is not None and not self._compared:
            # only for the first plan of a run: later plans keep the techniques of these blocks
            self.step_outside_decoder = step_beside_decoder(trainer)
        before = () if trained is None or fits else trained.rules
        # the evaluated module may differ from the trained one
        names = [name for name, _ in trainer.lightning_module.named_modules()]
        self.in_chunks = tuple(
            rule for rule in before if rule.strategy == EVALUATED and fnmatch.filter(names, rule.fqn)
        )
        """Rules of the previous fit's plan by which an evaluation runs in chunks."""
        budgeted = request.device_memory is not None and not self.in_chunks
        self.evaluation = EvaluationOfModule.of(trainer) if budgeted else None
        matters = request.device_memory is not None or strategy.root_device.type == "cuda"
        self.validation = EvaluationOfModule.of_fit(trainer) if fits and matters else None

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
        return DrySteps.asked(strategies, request, ranks, run_ranks=strategy.world_size, budget=self.budget)

    @property
    def data(self) -> SingleCellDataModule | None:
        """The data module if it is a SingleCellDataModule; in others these attributes may have another meaning."""
        found = datamodule_of(self.trainer)
        return found if isinstance(found, SingleCellDataModule) else None

    @cached_property
    def read(self) -> tuple[Profile, model_shape.ModelShape, list[str]]:
        """Profile and shape of the run, and notes on what the prediction leaves out."""
        request, trainer, seen, why = self.request, self.trainer, self.profiled[0], self.not_profiled
        module, data = trainer.lightning_module, self.data
        reference, data_dir = isinstance(module, GLUE), request.data_dir_or(data)
        batch_size, unknown = self._cells
        if seen is not None:
            batch_size = seen.profile.batch_size or batch_size or 1
        notes = [note for note in (unknown if batch_size is None else "", why) if note]
        if seen is None and "mixed" in str(trainer.precision):
            notes.append(
                f"predicted without precision={trainer.precision!r}, which keeps some tensors in half the bytes"
            )
        if seen is None and not reference:
            notes.append("the optimiser state is counted as Adam's, twice the weights, for there are no optimisers yet")
        slots = RMSPROP_SLOTS if reference else ADAM_SLOTS
        shape = with_unsupported(module, describe(module, batch_size=batch_size or 1, optimizer_slots=slots))
        shape = replace(shape if reference else model_shape.with_counts(shape), profiled=seen is not None)
        threads, queries = torch.get_num_threads(), self.request.chunk_queries
        shape = replace(shape, decoder=replace(shape.decoder, threads=threads, queries=queries))
        notes += unpredicted(module, shape)
        if data_dir is None:
            return model_shape.profile_of_module(shape), on_device(shape, self.rates[0]), notes
        profile = read_profile(data_dir, setting=getattr(data, "setting", None))
        # only loaded modalities count, and they are decomposed only if the module has a decomposed decoder
        loaded, modalities = getattr(data, "modalities", None), []
        used = [m for m in profile.modalities if loaded is None or m.name in loaded]
        for modality in used:
            others = [m.features for m in used if m is not modality]
            scale = modality.features / max(others) if others else None
            own = modality.decomposition
            parts = replace(own, **model_shape.attention_of(shape.decoder)) if own and shape.decoder else None
            modalities.append(replace(modality, scale=scale, decomposition=parts))
        profile = replace(profile, modalities=tuple(modalities))
        if reference:
            # add the layers of the reference model that are outside its strata
            settings = module.hparams
            names = [field.name for field in fields(model_shape.NetworkShape) if field.name in settings]
            network = model_shape.NetworkShape(**{name: settings[name] for name in names})
            dim = shape.decoder.dim or int(settings.get("latent_dim", model_shape.LATENT_DIM))
            shape = model_shape.outside_strata(shape, network, profile, latent_dim=dim)
        elif shape.decoder:
            notes.append(
                "of the activations outside the decoder the counts and the inputs of layers that read them all are"
                " predicted: the others are those of another's model"
            )
        return profile, on_device(shape, self.rates[0]), notes

    @cached_property
    def profiled(self) -> tuple[ProfiledStep | None, str]:
        """The profiled step of a module without a decoder, or None; and the reason if it cannot be profiled."""
        if self.step is None:
            return None, ""
        try:
            shared = self.strategy.world_size > 1 and self.request.share_batch_statistics
            found = self.step.profiled(self.rates[0], requested=self.request.specs, shared_statistics=shared)
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
        if self.request.device_speeds is None:
            return ()
        return measured_speeds(self.strategy.root_device, self.strategy.world_size)

    def within(self, n_bytes: int) -> "PlanningContext":
        """Return a copy with a budget of `n_bytes` for tensors."""
        fewer = copy.copy(self)
        fewer.request = replace(self.request, device_memory=f"{n_bytes}B")
        # of the cached values, only `memory` depends on it, and has bytes of tensors
        vars(fewer)["memory"] = (n_bytes,)
        return fewer

    def less(self, n_bytes: int) -> "PlanningContext":
        """Return the inputs with so many bytes of tensors less on each device; all other values are shared."""
        if not n_bytes:
            return self
        fewer = copy.copy(self)
        vars(fewer)["memory"] = tuple(max(1, n - n_bytes) for n in self.memory)
        return fewer

    def predicted_step(self, plan: Plan) -> ModuleProfile | None:
        """Return the profile of a plan's step; None if a technique's bytes come from closed forms, not a count."""
        rules = tuple(rule for rule in plan.rules if rule.strategy in PREDICTIONS)
        if self.step is None or not all(PREDICTIONS[rule.strategy].counted for rule in rules):
            return None
        return self.step.profile_with(rules)

    def as_planned(self, plan: Plan) -> ModuleProfile | str:
        """Return the step with a plan's rules as it was counted, or why it was not."""
        if self.step is not None and plan.diagnosis is not None:
            return self.step.as_planned(plan)
        return self.not_profiled or (f"the bytes of {plan.evaluates} are estimated" if plan.evaluates else OF_DECODER)

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
