"""Run a module whose blocks are pipeline stages: what it does not support, and what replaces the module's steps."""

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.installing.installed import Installed
from lightning_amp.lightning.checkpoints.stage_parameters import StageParameters
from lightning_amp.lightning.strategy.refusals import AVERAGED, KEEPS_LAYERS, is_named
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.techniques.chunk.spec import ChunkBlock
from lightning_amp.techniques.data.row import BalanceCells, DataParallel, ShareBatchStatistics
from lightning_amp.techniques.pipeline.options import no_pipeline
from lightning_amp.techniques.pipeline.run.block_walk import StageBlock, spans
from lightning_amp.techniques.pipeline.run.blocks import refuse_batch_statistics
from lightning_amp.techniques.pipeline.run.run_stages import Stages
from lightning_amp.techniques.pipeline.spec import PipelineStages
from lightning_amp.techniques.pipeline.steps.pipelined_steps import PipelinedSteps, refuse_hooks
from lightning_amp.techniques.recompute.row import RecomputeBlock

TOGETHER = (DataParallel, BalanceCells, ShareBatchStatistics, PipelineStages, RecomputeBlock, ChunkBlock)
"""Rules that go together with stages."""
SEE_GRADIENTS = (
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
)
NORMS = ("clip_grad_norm_", "get_total_norm", "grad_norm")


def check_run(request: Request, trainer: pl.Trainer, model: nn.Module, rules: Iterable[Rule] = ()) -> None:
    """Refuse what a pipeline would train otherwise than one process.

    Raises:
        PlanError: Options, callbacks, other techniques or a module that do not go together with stages.
        InstallError: Batch normalisation, or hooks on parameters.
    """
    refuse_batch_statistics(model)
    for parameter in model.parameters():
        refuse_hooks(parameter)
    asked: list[tuple[bool, str, str]] = [
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision!r}",
            "stages run the backward pass before the loss is scaled: use 'bf16-mixed' or '32-true'",
        ),
        (
            request.check_finite,
            "check_finite=True",
            "a stage has the values of the blocks of this stage only",
        ),
        (
            request.save_distributed_checkpoint,
            "save_distributed_checkpoint=True",
            "checkpoints of stages are files by now",
        ),
    ]
    asked += [
        (
            True,
            type(callback).__name__,
            "it changes or averages parameters that a rank does not hold: leave it out",
        )
        for callback in getattr(trainer, "callbacks", ())
        if is_named(callback, (*AVERAGED, *KEEPS_LAYERS))
    ]
    asked += [
        (True, rule.strategy, "it was not tried inside of stages: leave it out")
        for rule in rules
        if not isinstance(rule.spec, TOGETHER)
    ]
    asked += [
        (
            True,
            f"chunk of {rule.fqn!r}",
            "what follows its blocks is run by the last stage: leave that rule out",
        )
        for rule in rules
        if isinstance(rule.spec, ChunkBlock) and rule.spec.after
    ]
    asked += [
        (
            True,
            f"{norm!r} in {hook}",
            "a rank has the gradients of its stage only: take the Trainer's gradient_clip_val, or"
            " self.trainer.strategy.gradient_norm(), which every rank calls",
        )
        for hook, norm in _norms_by_hand(trainer.lightning_module)
    ]
    for found, what, why in asked:
        if found:
            raise PlanError(f"pipeline cannot be used with {what}; {why}, or leave 'pipeline' out")


def without_stages(
    seen: ProfiledStep, device: torch.device, request: Request, trainer: pl.Trainer
) -> ProfiledStep:
    """The step without a pipeline, where the run's options or its device do not go with one."""
    if device.type != "cpu":
        return no_pipeline(seen, f"it runs on the CPU by now, and not on {device.type!r}")
    chosen = request.plan or request.strategies or request.model_parallel_size not in ("auto", 1)
    if not (chosen or trainer.lightning_module.automatic_optimization):
        why = "its step optimises by hand, and the run shows whether stages can do so: ask for strategies='pipeline'"
        return no_pipeline(seen, why)
    try:
        check_run(request, trainer, trainer.lightning_module)
    except AmpError as error:
        return no_pipeline(seen, str(error))
    return seen


def pipelined(
    module: pl.LightningModule, installed: Installed, spec: PipelineStages, mesh: DeviceMesh
) -> tuple[StageParameters, PipelinedSteps]:
    """Free what other stages hold, and let the module's steps run as stages until these are undone."""
    overridden = [(one.fqn, one.module, one.override.run) for one in installed.overridden]
    calls = [(fqn, block, run) for fqn, block, run in overridden if isinstance(run, StageBlock)]
    blocks = {fqn: block for fqn, block, _ in calls}
    stages = Stages(calls[0][2].walk, spans(map(int, spec.ends.split(","))), mesh["model"], module.device)
    ranks = [n % mesh.size(1) for n, span in enumerate(stages.spans) for _ in range(span.first, span.end)]
    parameters = StageParameters(module, [(block, ranks[call.index]) for _, block, call in calls], mesh)
    steps = PipelinedSteps(module, blocks, stages, parameters, spec, data_rank=mesh["data"].get_local_rank())
    return parameters, steps


def _norms_by_hand(module: pl.LightningModule) -> list[tuple[str, str]]:
    """Hooks of the user's that take a norm over all gradients, of which a rank has its stage's, and how."""
    codes = {name: getattr(getattr(type(module), name), "__code__", None) for name in SEE_GRADIENTS}
    return [(name, norm) for name, code in codes.items() for norm in NORMS if code and norm in code.co_names]
