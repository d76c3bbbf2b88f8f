"""A run whose blocks are stages of a pipeline: what it refuses, and what takes the place of the module's steps."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import PlanError
from lightning_amp.lightning.checkpoints.stage_parameters import StageParameters
from lightning_amp.lightning.steps.pipelined_steps import PipelinedSteps, refuse_hooks
from lightning_amp.lightning.strategy.refusals import AVERAGED, KEEPS_LAYERS, is_named
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.parallel.install import Installed
from lightning_amp.parallel.pipeline.block_walk import BlockCall, spans
from lightning_amp.parallel.pipeline.blocks import refuse_batch_statistics
from lightning_amp.parallel.pipeline.run_stages import Stages
from lightning_amp.planning.plan.specs import PipelineStages


def check_run(request: Request, trainer: pl.Trainer, model: nn.Module) -> None:
    """Refuse what a pipeline would train otherwise than one process.

    Raises:
        PlanError: Options, callbacks or a module that do not go together with stages.
        InstallError: Batch normalisation, or hooks on parameters.
    """
    refuse_batch_statistics(model)
    for parameter in model.parameters():
        refuse_hooks(parameter)
    asked: list[tuple[bool, str, str]] = [
        (
            not trainer.lightning_module.automatic_optimization,
            "automatic_optimization=False",
            "a manual step calls backward while earlier stages have left it: let the Trainer optimise",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision!r}",
            "stages run the backward pass before the loss is scaled: use 'bf16-mixed' or '32-true'",
        ),
        (request.check_finite, "check_finite=True", "a stage has the values of its own blocks only"),
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
    for found, what, why in asked:
        if found:
            raise PlanError(f"pipeline was asked for together with {what}; {why}, or leave 'pipeline' out")


def pipelined(
    module: pl.LightningModule, installed: Installed, spec: PipelineStages, mesh: DeviceMesh
) -> tuple[StageParameters, Callable[[], None]]:
    """Free what other stages hold, and let the module's steps run as stages; returns what undoes the latter."""
    calls: list[tuple[nn.Module, BlockCall]] = [
        (block, _call_of(block)) for block in installed.forwards.values()
    ]
    stages = Stages(calls[0][1].walk, spans(map(int, spec.ends.split(","))), mesh["model"], module.device)
    ranks = [n % mesh.size(1) for n, span in enumerate(stages.spans) for _ in range(span.first, span.end)]
    parameters = StageParameters(module, [(block, ranks[call.index]) for block, call in calls], mesh)
    steps = PipelinedSteps(module, stages, parameters, spec, data_rank=mesh["data"].get_local_rank())
    return parameters, steps.undo


def _call_of(block: Any) -> BlockCall:
    call = block.forward.func
    assert isinstance(call, BlockCall), "the technique of a pipeline has installed it"
    return call
