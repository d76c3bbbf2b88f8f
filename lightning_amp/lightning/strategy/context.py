"""Read what the plans of one run depend on: its data, its step, rates, budget and speeds, equal on all ranks."""

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
from lightning_amp.lightning.profiling.loaders import Cells, cells_per_step
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.strategy.hardware import device_budget, measured_speeds
from lightning_amp.lightning.strategy.mesh_strategy import MeshStrategy
from lightning_amp.lightning.strategy.refusals import without_stages
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.models.glue import GLUE
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
    with_steps,
)

ADAM_SLOTS = 2
"""Assumed for a module that is not the reference model: its optimisers do not exist yet."""
RMSPROP_SLOTS = 1
SHOWN = 8
"""Differences that are spelled out."""
OF_THE_MACHINE = ("data_dir", "budget_bytes")
COMPARED = (
    *("policy", "strategies", "model_parallel_size", "share_batch_statistics", "balance_cells"),
    *("blocks", "fsdp_ranks", "fsdp_offload", "device_speeds"),
)


class PlanningContext:
    """The planner inputs of one run: read when the first one is made, on rank 0, and kept for the others.

    Args:
        cells: What `cells_per_step` gave, where it was called already; else all ranks call it here.
        trained: The plan of the run before.
    """

    def __init__(
        self, strategy: MeshStrategy, trainer: pl.Trainer, *, cells: Cells | None = None, trained: Plan | None = None
    ) -> None:
        self.request, self.strategy, self.trainer = strategy.request, strategy, trainer
        request = self.request
        self._cells, self._compared = cells_per_step(trainer) if cells is None else cells, cells is not None
        bounded = request.device_memory is not None and request.if_unfit == "refuse"
        limit = self.budget if bounded else None
        fits = trainer.state.fn == TrainerFn.FITTING
        self.steps = self._dry_steps(None if fits else trained)
        self.step = StepOfModule.of(trainer, limit_bytes=limit, steps=self.steps)
        ids = () if request.strategies is None else parse_strategies(request.strategies)
        self.blocks_outside = of_blocks_outside(ids)
        """What was requested of blocks outside, if there is a decoder."""
        self.outside: StepOfModule | None = None
        """The step with a decoder, of which blocks outside of it are planned: those requested, or as a budget asks."""
        if self.blocks_outside:
            self.outside = StepOfModule.of(trainer, decoder=True, limit_bytes=limit)
        elif request.chooses and request.device_memory is not None and not self._compared:
            # later in a run its blocks stay
            self.outside = step_beside_decoder(trainer)
        before = () if trained is None or fits else trained.rules
        # another module may be evaluated than was trained
        names = [name for name, _ in trainer.lightning_module.named_modules()]
        self.in_chunks = tuple(
            rule for rule in before if rule.strategy == EVALUATED and fnmatch.filter(names, rule.fqn)
        )
        """Rules by which an evaluation runs as the fit before it."""
        budgeted = request.device_memory is not None and not self.in_chunks
        self.evaluation = EvaluationOfModule.of(trainer) if budgeted else None

    def _dry_steps(self, trained: Plan | None) -> DrySteps | None:
        """The technique with steps that a request names, or that the plan of a fit before had, for rank 0."""
        request, strategy = self.request, self.strategy
        plan = request.given_plan or trained
        if plan is not None and (name := with_steps(plan.strategies)):
            return DrySteps(name, plan.spec_of(name), plan.mesh.model, run_ranks=strategy.world_size)
        strategies = parse_strategies(request.strategies or "S1")
        if not with_steps(strategies):
            return None
        size = request.model_parallel_size
        ranks = strategy.num_processes if size == "auto" else size
        return DrySteps.asked(strategies, request, ranks, run_ranks=strategy.world_size, budget=self.budget)

    @property
    def data(self) -> SingleCellDataModule | None:
        """The data that a plan is made from: another data module may mean something else by `data_dir` or `balance`."""
        found = datamodule_of(self.trainer)
        return found if isinstance(found, SingleCellDataModule) else None

    @cached_property
    def read(self) -> tuple[Profile, model_shape.ModelShape, list[str]]:
        """Profile and shape of the run, and what a prediction leaves out."""
        request, trainer, seen, why = self.request, self.trainer, self.seen[0], self.not_profiled
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
        shape = replace(shape, decoder=replace(shape.decoder, threads=torch.get_num_threads()))
        notes += unpredicted(module, shape)
        if data_dir is None:
            return model_shape.profile_of_module(shape), on_device(shape, self.rates[0]), notes
        profile = read_profile(data_dir, setting=getattr(data, "setting", None))
        # the modalities that the data module loads; without a decomposed decoder in the module, none is decomposed
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
            # what lies outside the strata of the reference model
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
    def seen(self) -> tuple[ProfiledStep | None, str]:
        """The step of a module without a decoder, None where it has one or cannot be profiled, and why it cannot."""
        if self.step is None:
            return None, ""
        try:
            shared = self.strategy.world_size > 1 and self.request.share_batch_statistics
            found = self.step.profiled(self.rates[0], requested=self.request.specs, shared_statistics=shared)
            return without_stages(found, self.strategy.root_device, self.request, self.trainer), ""
        except PlanError:
            # it was to run with values, and there was not enough memory for that
            raise
        except AmpError as error:
            if isinstance(error.__cause__, ShardError):
                # an operator of the step has no parts, and would fail in the run too
                raise error.__cause__ from None
            return None, str(error)

    @property
    def not_profiled(self) -> str:
        """Why the peak is not known; "" where the step was profiled, or is that of a decoder."""
        return self.seen[1] and f"the step was not profiled, and its peak is not known: {self.seen[1]}"

    @cached_property
    def rates(self) -> tuple[Rates, list[str]]:
        """What a device reaches, and a note where it is not known."""
        if self.request.rates is not None:
            found, note = Rates.read(self.request.rates), ""
        else:
            found, note = rates_of(self.strategy.root_device, str(self.trainer.precision))
        # whatever device a file is of, settings are those of the device here
        found = replace(found, launches=self.strategy.root_device.type != "cpu")
        return found.on_nodes_of(self.strategy.num_processes), [note] if note else []

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of every device; one number where all have as many."""
        if self.request.device_memory is not None:
            return memory_of_ranks(self.request.device_memory, self.strategy.world_size)
        return (device_budget(self.strategy.root_device, node_ranks=self.strategy.num_processes),)

    @property
    def budget(self) -> int:
        """Bytes of the smallest device."""
        return min(self.memory)

    @property
    def grid_ranks(self) -> int | None:
        """Ranks of the model axis that a grid of ranks takes, which may have been chosen; None without a grid."""
        if self.steps is None or not STRATEGIES[self.steps.name].data_axis:
            return None
        return self.steps.ranks

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Of all ranks, by that of the fastest; none where they are taken as equal. All ranks ask for it first."""
        if self.request.device_speeds is None:
            return ()
        return measured_speeds(self.strategy.root_device, self.strategy.world_size)

    def within(self, n_bytes: int) -> "PlanningContext":
        """The same, with fewer bytes."""
        fewer = copy.copy(self)
        fewer.request = replace(self.request, device_memory=f"{n_bytes}B")
        # the copy has all that was read by now, of which the memory alone follows from the request's bytes
        vars(fewer).pop("memory", None)
        return fewer

    def predicted_step(self, plan: Plan) -> ModuleProfile | None:
        """The profile of a plan's step; None where it was not counted, as of techniques whose bytes are added up."""
        rules = tuple(rule for rule in plan.rules if rule.strategy in PREDICTIONS)
        if self.step is None or not all(PREDICTIONS[rule.strategy].counted for rule in rules):
            return None
        return self.step.profile_with(rules)

    def forget_step(self) -> None:
        """Let go of the batch that a step was profiled with; what was seen of it stays."""
        if self.step is not None:
            self.step.forget()
        self.step = None

    def compare(self) -> None:
        """Compare, once in a run, everything that decides the plan with rank 0; a collective, after which all ranks go
        on or none.

        Paths, memory and rates are left out, for machines may differ in them, and so is the batch size, for ranks may
        have unequal numbers of cells; rank 0's count. Raises PlanError: another rank's facts differ; on all ranks, with
        the same text.
        """
        n_ranks = self.strategy.world_size
        if self._compared or n_ranks == 1:
            return
        everyones: list[Any] = [None] * n_ranks
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
    """Everything that decides the plan, by name, as this rank sees it; `data` is the data module or None."""
    found: dict[str, Any] = {name: getattr(request, name) for name in COMPARED}
    try:
        if (plan := request.given_plan) is not None:
            found["plan"] = json.loads(plan.to_json())
        if (data_dir := request.data_dir_or(data)) is not None:
            read = read_profile(data_dir, setting=getattr(data, "setting", None))
            graph = read.graph and asdict(read.graph)
            found["data"] = {"modality": {m.name: asdict(m) for m in read.modalities}, "graph": graph}
    except AmpError as error:
        # compared like all else: a rank that raised it here would leave the others in the collective
        found["error"] = str(error)
    return {name: value for name, value in _flat(found) if name.rpartition(".")[2] not in OF_THE_MACHINE}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, repr(value)
