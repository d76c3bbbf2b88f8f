"""Define the row of "pipeline" in the table of techniques, and its spec in a plan."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.errors import PlanError
from lightning_amp.techniques.option_checks import one_of, whole_number
from lightning_amp.techniques.pipeline.schedule.schedules import SCHEDULES
from lightning_amp.techniques.technique import Installer, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStages:
    """Split the blocks of a module list into runs over the model axis, and pass micro-batches through them.

    Attributes:
        ends: One past the last block of every stage, separated by commas, such as "2,4,6"; stage s is on rank s mod the
            ranks of the model axis. "" before the cut is chosen.
        schedule: "gpipe", "1f1b" or "interleaved".
        micro_batches: Number per batch; a batch with fewer samples has one per sample.
        stages_per_rank: More than 1 for "interleaved" only.
        read_after: Parameters of blocks that the step reads after all blocks too, outside of their block's call, by
            their names in the list, separated by commas: the rank of the last stage holds them as well.
    """

    ends: str = ""
    schedule: str = "1f1b"
    micro_batches: int = 4
    stages_per_rank: int = 1
    read_after: str = ""


def _requested_spec(spec: PipelineStages, request: Any) -> tuple[PipelineStages, bool]:
    """Return the spec with `micro_batches` and `schedule` of a request; "interleaved" has two stages per rank."""
    micro_batches, schedule = getattr(request, "micro_batches", None), getattr(request, "schedule", None)
    whole_number("micro_batches", micro_batches, least=1)
    one_of("schedule", schedule, (None, *SCHEDULES))
    spec = replace(spec, micro_batches=micro_batches or spec.micro_batches)
    if schedule is not None and schedule != spec.schedule:
        spec = replace(spec, schedule=schedule, stages_per_rank=2 if schedule == "interleaved" else 1, ends="")
    return spec, True


def _settle(spec: PipelineStages, shape: ModelShape, ranks: int) -> PipelineStages:
    """Return the spec with stages of nearly equal numbers of blocks; the first stages have one more.

    Raises:
        PlanError: There are more stages than blocks.
    """
    if spec.ends:
        return spec
    stages = ranks * spec.stages_per_rank
    name, blocks = shape.block_list or ("", 0)
    if stages > blocks:
        raise PlanError(
            f"pipeline got {stages!r} stages, and {name!r}, the longest list of modules, has {blocks!r}"
            f" blocks; choose model_parallel_size={blocks!r} at most, or leave 'pipeline' out"
        )
    ends = (sum(blocks // stages + (s < blocks % stages) for s in range(n + 1)) for n in range(stages))
    return replace(spec, ends=",".join(map(str, ends)))


def _unsuited(shape: ModelShape, strategies: Collection[str]) -> str:
    others = [strategy for strategy in strategies if strategy not in ("S1", "pipeline")]
    if others:
        return f"pipeline is supported together with S1 only, found {', '.join(others)}: leave {', '.join(others)} out"
    if shape.decoder:
        return (
            f"pipeline: {shape.decoder.fqn!r} is a decoder of strata, which all read the latents of the cells and"
            " add to one loss, so that they cannot be stages. Use 'strata', which splits them over the model axis,"
            " or leave 'pipeline' out"
        )
    if shape.block_list is None:
        return (
            "pipeline requires a ModuleList or Sequential of two or more modules, and the module has none outside"
            " of what torch.compile has compiled: put its blocks into one, or leave 'pipeline' out"
        )
    return ""


ROW = Technique(
    title="pipeline of stages",
    shrinks="K blocks to those of a rank",
    specs=(PipelineStages,),
    installers={PipelineStages: Installer("lightning_amp.techniques.pipeline.run.blocks:pipeline_stages", last=True)},
    # the stages depend on the mesh, and are set later (`settle`)
    conflicts={"chunk": "stages hold blocks as they are, or recompute them; use recompute"},
    targets=lambda shape: [] if shape.block_list is None else [(shape.block_list[0], PipelineStages())],
    model_axis=True,
    option_names=("micro_batches", "schedule"),
    options=_requested_spec,
    settle=_settle,
    unsuited=_unsuited,
    look="lightning_amp.techniques.pipeline.look:look",
    search="lightning_amp.techniques.pipeline.search:SEARCH",
    refusal="lightning_amp.techniques.pipeline.look:refusal",
)
