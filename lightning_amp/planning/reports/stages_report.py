"""Format the stages of a plan's pipeline as text of at most 80 columns, and draw its schedule."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lightning_amp.figures import PALETTE, new_figure, save_figure
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.schedules import Timeline, schedule, timeline
from lightning_amp.text_table import WIDTH, table


def pipeline_rule(plan: Plan) -> tuple[str, PipelineStages]:
    """Return the name of the list of blocks that is split into stages, and its spec."""
    return next((rule.fqn, rule.spec) for rule in plan.rules if isinstance(rule.spec, PipelineStages))


def schedule_title(plan: Plan) -> str:
    """Return a title for a picture of the schedule."""
    _, spec = pipeline_rule(plan)
    return f"{spec.ends.count(',') + 1} stages, {spec.micro_batches} micro-batches by {spec.schedule}"


def stages_section(plan: Plan) -> str:
    """Format blocks, seconds, bytes and bubble of every stage."""
    name, spec = pipeline_rule(plan)
    rows = [
        [
            str(n),
            str(stage.rank),
            f"{stage.first}" if stage.end == stage.first + 1 else f"{stage.first}-{stage.end - 1}",
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
    """Return what each rank of a plan's pipeline is predicted to compute, and when."""
    _, spec = pipeline_rule(plan)
    orders = schedule(spec.schedule, plan.mesh.model, spec.micro_batches, stages_per_device=spec.stages_per_rank)
    return timeline(orders, plan.stages)


NUMBERED = 0.012
"""Share of a schedule from which a pass is wide enough for its number."""
IDLE = "#e6e6e6"


class Panel(NamedTuple):
    """One run of a schedule.

    Attributes:
        name: "predicted", "measured" ...
        rest_seconds: Seconds before the last stage's first backward pass, for the complete batch.
    """

    name: str
    line: Timeline
    rest_seconds: float


def schedule_chart(path: Path, *, panels: Sequence[Panel], title: str) -> None:
    """Draw what each rank of a pipeline computes over time, with one panel and time axis per run; bubbles are grey."""
    ranks = len(panels[0].line.passes)
    figure = new_figure(10.0, 0.9 + len(panels) * (0.9 + 0.45 * ranks))
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, panel)
    colours = {"forward": PALETTE[0], "backward": PALETTE[1], "idle": IDLE}
    if any(panel.rest_seconds for panel in panels):
        colours["after the blocks"] = PALETTE[2]
    keys = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    figure.suptitle(title)
    save_figure(figure, path)


def _draw(axes: Axes, panel: Panel) -> None:
    line, end = panel.line, panel.line.seconds
    unit, size = ("s", 1.0) if end >= 1 else ("ms", 1e-3)
    for row, rank in enumerate(line.with_rest(panel.rest_seconds)):
        axes.barh(row, end / size, color=IDLE, height=0.8, zorder=1)
        for step, (begin, stop) in rank.items():
            left, width = begin / size, (stop - begin) / size
            colour = PALETTE[2 if step is None else int(step.backward)]
            axes.barh(row, width, left=left, color=colour, height=0.8, edgecolor="white", linewidth=0.6, zorder=2)
            if step and stop - begin >= NUMBERED * end:
                place, text = (left + width / 2, row), str(step.micro_batch)
                axes.text(*place, text, ha="center", va="center", fontsize=7, color="white", clip_on=True)
    named = [
        f"rank {row}: stage {', '.join(str(s) for s in sorted({step.stage for step in rank}))}"
        for row, rank in enumerate(line.passes)
    ]
    axes.set_title(f"{panel.name}: {format_seconds(end)}, micro-batches numbered", loc="left", fontsize="medium")
    axes.set_xlabel(f"time ({unit})")
    axes.set_yticks(range(len(named)), named)
    axes.set_xlim(0, end / size)
    axes.invert_yaxis()
    for row, idle in enumerate(line.idle):
        axes.text(1.01, row, f"{100 * idle:.0f} % idle", transform=axes.get_yaxis_transform(), va="center")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
