"""Define the row of pipeline in the table of techniques."""

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.techniques.pipeline.spec import PipelineStages
from lightning_amp.techniques.technique import Installer, Target, Technique


def _targets(shape: ModelShape) -> list[Target]:
    # the stages depend on the mesh, and are filled in later
    return [] if shape.block_list is None else [(shape.block_list[0], PipelineStages(ends=""))]


ROW = Technique(
    title="pipeline of stages",
    shrinks="K blocks to those of a rank",
    specs=(PipelineStages,),
    installers={
        PipelineStages: Installer("lightning_amp.techniques.pipeline.run.blocks:pipeline_stages", last=True)
    },
    targets=_targets,
    model_axis=True,
    look="lightning_amp.techniques.pipeline.look:look",
    refusal="lightning_amp.techniques.pipeline.look:refusal",
)
