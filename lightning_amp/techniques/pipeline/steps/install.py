"""Install stages: free the parameters of other ranks, and replace the steps of a module by pipelined ones."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.run.block_walk import StageBlock, spans
from lightning_amp.techniques.pipeline.run.run_stages import Stages
from lightning_amp.techniques.pipeline.steps.pipelined_steps import PipelinedSteps, RankParameters

Held = Callable[[LightningModule, Sequence[tuple[nn.Module, int]], DeviceMesh], RankParameters]
"""(module, its blocks with the rank of the model axis of each, mesh) -> parameters, with those of other ranks freed."""


def install(
    module: LightningModule,
    overridden: Sequence[tuple[str, nn.Module, Any]],
    spec: PipelineStages,
    mesh: DeviceMesh,
    parameters_of: Held,
) -> tuple[RankParameters, PipelinedSteps]:
    """Free what other stages hold, and let the module's steps run as stages until these are undone.

    Args:
        module: Its blocks have been replaced by those of stages.
        overridden: Of all modules with another forward: name, module, and what runs there.
        spec: Of the plan.
        mesh: With the axes "data" and "model".
        parameters_of: Holds the module's parameters.
    """
    calls = [(fqn, block, run) for fqn, block, run in overridden if isinstance(run, StageBlock)]
    blocks = {fqn: block for fqn, block, _ in calls}
    stages = Stages(calls[0][2].walk, spans(map(int, spec.ends.split(","))), mesh["model"], module.device)
    ranks = [n % mesh.size(1) for n, span in enumerate(stages.spans) for _ in range(span.first, span.end)]
    parameters = parameters_of(module, [(block, ranks[call.index]) for _, block, call in calls], mesh)
    steps = PipelinedSteps(module, blocks, stages, parameters, spec, data_rank=mesh["data"].get_local_rank())
    return parameters, steps
