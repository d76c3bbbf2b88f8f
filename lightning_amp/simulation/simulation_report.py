"""Format a simulation in at most 80 columns: whether it fits, memory by kind, possible remedies; or draw it."""

import re
from collections.abc import Iterable
from itertools import groupby
from math import nan
from pathlib import Path
from textwrap import wrap

from lightning_amp.diagnosis import ATTENTION_DECODER
from lightning_amp.figures import simulated_memory
from lightning_amp.footprint.module_profile import KINDS
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.auto import LOCAL_ATTENTION_ONLY, NEEDS_ATTENTION
from lightning_amp.planning.reports.plan_report import batch_text, sample_word
from lightning_amp.quantities import format_bytes
from lightning_amp.simulation.simulate import Simulation
from lightning_amp.techniques.table import STRATEGIES, conflicts, label
from lightning_amp.text_table import WIDTH, table

STRATA_PER_LINE = 5
GLUED = "\u00a0"
"""Non-breaking space between a number and its unit while lines are wrapped."""
SHORT = {"parameters": "params", "gradients": "grads", "optimiser state": "optim"}


def simulation_report(simulation: Simulation) -> str:
    """Format the status, memory of the ranks by kind and after each stratum, communication, and notes."""
    plan = simulation.plan
    names = ", ".join(map(label, plan.strategies)) or "single-device execution"
    mesh = plan.mesh
    ranks = f"{mesh.data:,} data x {mesh.model:,} model, {batch_text(plan)} per rank and step"
    sections = [
        _wrapped(f"Simulated training step: {names}", indent=""),
        f"{_wrapped(_status(simulation))}\nmesh: {ranks}",
        _memory(simulation),
        _prediction(simulation),
    ]
    if simulation.worst.strata_bytes:
        sections.append(_strata(simulation))
    sections.append(_communication(simulation))
    if simulation.worst.failed_at is not None:
        sections.append(_remedies(plan))
    sections += [_wrapped(f"- {note}") for note in plan.notes]
    return "\n\n".join(sections)


def draw(path: Path, simulation: Simulation) -> None:
    """Draw the memory after each stratum of the worst rank, as PNG."""
    plan, worst = simulation.plan, simulation.worst
    held = worst.bytes_of_strata
    names = ", ".join(plan.strategies)
    what = f"{names}, {plan.mesh.data} x {plan.mesh.model} ranks (data x model)" if names else "one device"
    simulated_memory(
        path,
        # strata before a rank's own are on other ranks
        simulated_bytes=[held.get(k, nan) for k in range(max(held, default=-1) + 1)],
        predicted_bytes=plan.strata_bytes,
        peak_bytes=worst.peak_bytes,
        failed_at=worst.failed_at,
        budget_bytes=plan.budget_bytes,
        title=f"Simulated step: {what}",
        rank_label=f"rank {worst.rank}",
    )


def _wrapped(text: str, indent: str = "  ") -> str:
    glued = re.sub(r"(?<=\d) (?=([KMGT]i)?B\b)", GLUED, text)
    lines = wrap(glued, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines).replace(GLUED, " ")


def _status(simulation: Simulation) -> str:
    worst, budget = simulation.worst, simulation.plan.budget_bytes
    if worst.requested_bytes is None or budget is None:
        fits = "no device memory given" if budget is None else f"fits in {format_bytes(budget)}"
        if simulation.plan.on_device is not None:
            fits += f", what is left to tensors of {format_bytes(simulation.plan.on_device.budget_bytes)}"
        return f"status: {simulation.status} ({fits})"
    held = format_bytes(worst.peak_bytes - worst.requested_bytes)
    return (
        f"status: {simulation.status} (rank {worst.rank} holds {held} of {format_bytes(budget)} and asks for"
        f" {format_bytes(worst.requested_bytes)})"
    )


def _memory(simulation: Simulation) -> str:
    """Format the memory of ranks; ranks with the same text share a row."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for result in simulation.ranks:
        row = (result.peak_bytes, *(result.breakdown[kind] for kind in KINDS))
        groups.setdefault(tuple(format_bytes(n).rjust(8) for n in row), []).append(result.rank)
    header = ["peak of", "in all", *(SHORT.get(kind, kind) for kind in KINDS)]
    return table(header, [[f"rank {_runs(ranks)}", *row] for row, ranks in groups.items()])


def _prediction(simulation: Simulation) -> str:
    plan = simulation.plan
    peak, predicted = simulation.worst.peak_bytes, plan.predicted_peak_bytes
    found = f"peak: simulated {format_bytes(peak)}"
    if not plan.strata_bytes:
        return f"{found}, predicted unknown: no decomposed decoder was detected"
    if simulation.worst.failed_at is not None:
        return f"the plan predicts a peak of {format_bytes(predicted)} for a whole step"
    return f"{found}, predicted {format_bytes(predicted)} ({100 * (predicted / peak - 1):+.1f} %)"


def _strata(simulation: Simulation) -> str:
    """Format simulated and predicted bytes per stratum, several to a line; adjacent equal texts share one."""
    worst, predicted = simulation.worst, simulation.plan.strata_bytes
    lines = [f"rank {worst.rank} after each stratum of the forward pass"]
    both = {k: (held, *predicted[k : k + 1]) for k, held in worst.bytes_of_strata.items()}
    read = {k: [*map(format_bytes, row), ""][:2] for k, row in both.items()}
    groups = [list(group) for _, group in groupby(read, key=lambda k: read[k])]
    for first in range(0, len(groups), STRATA_PER_LINE):
        shown = groups[first : first + STRATA_PER_LINE]
        rows = {"stratum  ": [_runs(group) for group in shown]}
        rows |= {name: [read[group[0]][i] for group in shown] for i, name in enumerate(("simulated", "predicted"))}
        lines += [f"  {name} " + "".join(text.rjust(12) for text in row) for name, row in rows.items() if any(row)]
    return "\n".join(lines)


def _communication(simulation: Simulation) -> str:
    worst = simulation.worst
    sent = worst.comm_bytes
    if not sent:
        return "nothing is handed to collectives in a step"
    rows = [[kind, format_bytes(n).rjust(8)] for kind, n in sorted(sent.items(), key=lambda item: -item[1])]
    return table(["collective", f"handed in by rank {worst.rank} in a step"], rows)


def _remedies(plan: Plan) -> str:
    """Return a table of changes that reduce memory and are not in the plan yet."""
    # choices that only change kernels need the same memory
    choices = {s: row.choice[0] for s, row in STRATEGIES.items() if row.choice is not None}
    of_decoder = [s for s, axis in choices.items() if axis != "kernels" and plan.strata_bytes]
    attends = ATTENTION_DECODER in plan.signals
    # the attention range is only in the plan's evidence
    full = any("by full attention" in said for said in plan.evidence)
    left = [
        s
        for s in of_decoder
        if s not in plan.strategies
        and not any(conflicts({*plan.strategies, s}))
        and (attends or s not in NEEDS_ATTENTION)
        and not (full and s in LOCAL_ATTENTION_ONLY)
    ]
    names = {s: label(s) for s in left}
    alone = [name for s, name in names.items() if not STRATEGIES[s].model_axis]
    shared = [name for s, name in names.items() if STRATEGIES[s].model_axis]
    rows = []
    if plan.batch_size > 1:
        rows.append([f"fewer {sample_word(plan)}s per step", "--batch-size, or batch in --shape"])
    if alone:
        rows.append(["strategies", f"{', '.join(alone)}; on one device too"])
    if shared:
        rows.append(["strategies", f"{', '.join(shared)}; from two devices on"])
    splitting = [s for s in plan.strategies if STRATEGIES[s].model_axis]
    if splitting:
        rows.append(["more devices", f"{' and '.join(splitting)} split over more ranks"])
    return table(["what may help", "how"], [*rows, ["larger devices", "--device-memory"]])


def _runs(numbers: Iterable[int]) -> str:
    """Format ascending numbers, as in "0-2, 4"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
