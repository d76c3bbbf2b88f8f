"""A simulation as text of at most 80 columns."""

from collections.abc import Iterable
from itertools import groupby
from textwrap import wrap

from lightning_amp.planning.byte_size import format_bytes
from lightning_amp.planning.report import WIDTH, table
from lightning_amp.planning.strategies import STRATEGIES
from lightning_amp.simulation.meter import KINDS
from lightning_amp.simulation.simulate import Simulation

STRATA_PER_LINE = 5
SHORT = {"parameters": "params", "gradients": "grads", "optimiser state": "optim"}


def simulation_report(simulation: Simulation) -> str:
    """Status, memory of the ranks by kind, after each stratum, and communication."""
    plan = simulation.plan
    names = ", ".join(f"{s} {STRATEGIES[s].title}" for s in plan.strategies) or "single-device execution"
    mesh = plan.mesh
    ranks = f"{mesh.data} data x {mesh.model} model, {plan.batch_size} cells per rank and step"
    sections = [
        "\n".join(wrap(f"Simulated training step: {names}", WIDTH)),
        "\n".join([*wrap(_status(simulation), WIDTH, subsequent_indent="  "), f"mesh: {ranks}"]),
        _memory(simulation),
        _prediction(simulation),
    ]
    if simulation.worst.strata_bytes:
        sections.append(_strata(simulation))
    sections.append(_communication(simulation))
    return "\n\n".join(sections)


def _status(simulation: Simulation) -> str:
    worst, budget = simulation.worst, simulation.plan.budget_bytes
    if worst.requested_bytes is None or budget is None:
        fits = "no device memory given" if budget is None else f"fits in {format_bytes(budget)}"
        return f"status: {simulation.status} ({fits})"
    held = format_bytes(worst.peak_bytes - worst.requested_bytes)
    return (
        f"status: {simulation.status} (rank {worst.rank} holds {held} of {format_bytes(budget)} and asks for"
        f" {format_bytes(worst.requested_bytes)})"
    )


def _memory(simulation: Simulation) -> str:
    groups: dict[tuple[int, ...], list[int]] = {}
    for result in simulation.ranks:
        row = (result.peak_bytes, *(result.breakdown[kind] for kind in KINDS))
        groups.setdefault(row, []).append(result.rank)
    header = ["peak of", "in all", *(SHORT.get(kind, kind) for kind in KINDS)]
    rows = [
        [f"rank {_runs(ranks)}", *(format_bytes(n).rjust(8) for n in row)] for row, ranks in groups.items()
    ]
    return table(header, rows)


def _prediction(simulation: Simulation) -> str:
    plan = simulation.plan
    peak, predicted = simulation.worst.peak_bytes, plan.predicted_peak_bytes
    found = f"simulated {format_bytes(peak)}, predicted {format_bytes(predicted)}"
    if simulation.worst.failed_at is not None or not plan.strata_bytes:
        return f"peak: {found}"
    return f"peak: {found} (EPM; {100 * (predicted / peak - 1):+.1f} %)"


def _strata(simulation: Simulation) -> str:
    """Some strata to a line: their numbers, simulated and predicted bytes."""
    lines = [f"rank {simulation.worst.rank} after each stratum of the forward pass"]
    strata_bytes, predicted = simulation.worst.strata_bytes, simulation.plan.strata_bytes
    both = (("simulated", strata_bytes), ("predicted", predicted))
    for first in range(0, len(strata_bytes), STRATA_PER_LINE):
        numbers = range(first, min(first + STRATA_PER_LINE, len(strata_bytes)))
        lines.append("  stratum   " + "".join(str(k).rjust(12) for k in numbers))
        for name, values in both:
            if len(values) > numbers[-1]:
                lines.append(f"  {name} " + "".join(format_bytes(values[k]).rjust(12) for k in numbers))
    return "\n".join(lines)


def _communication(simulation: Simulation) -> str:
    sent = simulation.worst.comm_bytes
    if not sent:
        return "nothing is handed to collectives"
    rows = [[kind, format_bytes(n).rjust(8)] for kind, n in sorted(sent.items(), key=lambda item: -item[1])]
    return table(["collective", f"handed in by rank {simulation.worst.rank} in a step"], rows)


def _runs(numbers: Iterable[int]) -> str:
    """Ascending numbers, as in "0-2, 4"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
