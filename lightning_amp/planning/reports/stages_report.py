"""The stages of a plan's pipeline as text of at most 80 columns, and what a picture of its schedule is drawn from."""

from textwrap import wrap

from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.table import WIDTH, table
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.schedule.schedules import schedule
from lightning_amp.techniques.pipeline.schedule.timeline import StageTimes, Timeline, timeline
from lightning_amp.techniques.pipeline.spec import PipelineStages


def pipeline_rule(plan: Plan) -> tuple[str, PipelineStages]:
    """The list of blocks that is cut, and how."""
    return next((rule.fqn, rule.spec) for rule in plan.rules if isinstance(rule.spec, PipelineStages))


def schedule_title(plan: Plan) -> str:
    """What is run, over a picture of its schedule."""
    _, spec = pipeline_rule(plan)
    return f"{spec.ends.count(',') + 1} stages, {spec.micro_batches} micro-batches by {spec.schedule}"


def stages_section(plan: Plan) -> str:
    """Blocks, seconds, bytes and bubble of every stage."""
    name, spec = pipeline_rule(plan)
    rows = [
        [
            str(n),
            str(stage.rank),
            _blocks(stage.first, stage.end),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            format_seconds(stage.send_forward_seconds + stage.send_backward_seconds),
            format_bytes(stage.peak_bytes),
            f"{100 * stage.idle:.0f} %",
        ]
        for n, stage in enumerate(plan.stages)
    ]
    header = ["stage", "rank", "blocks", "forward", "backward", "sends", "peak", "idle"]
    idle = sum(stage.idle for stage in plan.stages) / len(plan.stages)
    said = (
        f"stages of {name!r}: {spec.micro_batches} micro-batches by {spec.schedule}; seconds are of one of them, the"
        f" peak is the rank's, idle is the share of the schedule in which the rank waits: {100 * idle:.0f} % on average"
    )
    rest = plan.stages[-1].rest_seconds
    said += f"; what follows the blocks runs once, in {format_seconds(rest)}" if rest else ""
    return "\n".join([*wrap(said, WIDTH), table(header, rows)])


def timeline_of(plan: Plan) -> Timeline:
    """When every rank of a plan's pipeline is predicted to compute what."""
    _, spec = pipeline_rule(plan)
    stages = plan.stages
    orders = schedule(
        spec.schedule, plan.mesh.model, spec.micro_batches, stages_per_device=spec.stages_per_rank
    )
    times = StageTimes(
        forward=tuple(stage.forward_seconds for stage in stages),
        backward=tuple(stage.backward_seconds for stage in stages),
        send_forward=tuple(stage.send_forward_seconds for stage in stages),
        send_backward=tuple(stage.send_backward_seconds for stage in stages),
        rest=stages[-1].rest_seconds,
    )
    return timeline(orders, times)


def _blocks(first: int, end: int) -> str:
    return f"{first}" if end == first + 1 else f"{first}-{end - 1}"
