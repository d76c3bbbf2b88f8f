"""Write the times of a pipeline's passes in a measured training step, by rank, stage and micro-batch, to schedule.csv.

Columns of a row: rank, step (training batches so far), pass ("forward", "backward", or "after the blocks": the modules
that follow the blocks, for the complete batch), stage, micro_batch (None after the blocks), and begin and end in
seconds since the pipeline's first pass, measured and predicted (None without a prediction).
"""

import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_amp.data.files.directory import written_aside
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.stages_report import schedule_title, timeline_of
from lightning_amp.techniques.pipeline.schedule.schedules import Pass, PassTimes, Timeline

COLUMNS = (
    *("rank", "step", "pass", "stage", "micro_batch"),
    *("begin_s", "end_s", "predicted_begin_s", "predicted_end_s"),
)
FORWARD, BACKWARD, REST = "forward", "backward", "after the blocks"
Row = dict[str, Any]
Ran = tuple[int, int, PassTimes]
"""Rank, step, and times of the passes of that rank."""


def write_schedule(folder: Path, ran: Iterable[Ran], plan: Plan, *, plot: bool) -> list[Path]:
    """Write schedule.csv of all ranks, and draw schedule.png of the first pipeline; return their paths."""
    by_pipeline: dict[int, list[Ran]] = defaultdict(list)
    for one in sorted(ran, key=lambda one: one[0]):
        by_pipeline[one[0] // plan.mesh.model].append(one)
    predicted = timeline_of(plan) if plan.stages else None
    rest = plan.stages[-1].rest_seconds if plan.stages else 0.0
    said = predicted.with_rest(rest) if predicted is not None else ()
    lines = dict[int, Timeline]()
    for n, some in by_pipeline.items():
        every = [times.passes for _, _, times in some]
        # times relative to the pipeline's first pass
        zero = min(begin for passes in every for begin, _ in passes.values())
        moved = ({step: (a - zero, b - zero) for step, (a, b) in passes.items()} for passes in every)
        lines[n] = Timeline(passes=tuple(moved))
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(folder / "schedule.csv") as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for n, some in by_pipeline.items():
            for place, (rank, step, times) in enumerate(some):
                ran_then = lines[n].with_rest(times.rest_seconds)[place]
                for row in _rows(ran_then, said[place] if said else {}):
                    writer.writerow({"rank": rank, "step": step} | row)
    paths = [folder / "schedule.csv"]
    if plot:
        # imported late: matplotlib is slow to load
        from lightning_amp.planning.reports.stages_report import Panel, schedule_chart

        panels = [Panel("predicted", predicted, rest)] if predicted is not None else []
        measured = max(times.rest_seconds for _, _, times in by_pipeline[0])
        panels.append(Panel(f"measured, step {by_pipeline[0][0][1]}", lines[0], measured))
        with written_aside(folder / "schedule.png") as aside:
            schedule_chart(aside, panels=panels, title=schedule_title(plan))
        paths.append(folder / "schedule.png")
    return paths


def _rows(
    ran: dict[Pass | None, tuple[float, float]], predicted: dict[Pass | None, tuple[float, float]]
) -> Iterable[Row]:
    """Return the rows of one rank; both arguments have the form of `Timeline.with_rest`."""
    for step, measured in ran.items():
        said: tuple[float | None, float | None] = predicted.get(step, (None, None))
        if step is None:
            name, stage, micro_batch = REST, max(one.stage for one in ran if one), None
        else:
            name, stage, micro_batch = BACKWARD if step.backward else FORWARD, step.stage, step.micro_batch
        yield dict(zip(COLUMNS[2:], (name, stage, micro_batch, *measured, *said), strict=True))
