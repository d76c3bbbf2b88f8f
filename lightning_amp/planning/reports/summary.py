"""A plan in five lines of 80 columns: techniques, memory, time, what saves memory, and where the whole report is."""

from textwrap import wrap

from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.reports.module_report import alone
from lightning_amp.planning.reports.plan_report import batch_text, labels, peak_text, step_text, techniques
from lightning_amp.planning.reports.table import WIDTH
from lightning_amp.quantities import format_bytes

NAMES = 16
"""Columns of the names of lines."""


def plan_summary(plan: Plan, *, report: str = "") -> str:
    """The five lines, and every note that is a warning; a text that is too long goes on in the next line.

    Args:
        report: File that holds the whole report; "" where none is written.
    """
    mesh = plan.mesh
    ranks = f" on {mesh.data} data x {mesh.model} model ranks" if mesh.data * mesh.model > 1 else ""
    each = " per rank" if ranks else ""
    source = f" ({plan.rates_device})" if plan.rates_device else ""
    known = plan.predicted_step_seconds is not None
    rows = [
        ("plan", f"{labels(plan)}{ranks}"),
        ("predicted peak", f"{peak_text(plan)}{each}"),
        ("predicted step", f"{step_text(plan) if known else 'unknown'}, {batch_text(plan)}{each}{source}"),
        _helpful(plan),
        ("more", f"{report or 'print(trainer.strategy.plan)'}, or AMPStrategy(verbose=True)"),
    ]
    rows += [("note", note) for note in plan.notes if not isinstance(note, Explanation)]
    lines = list[str]()
    for name, text in rows:
        # a path is copied from here: it stays whole, however long it is
        parts = wrap(text, WIDTH - NAMES, break_long_words=False, break_on_hyphens=False)
        lines += [f"{first:<{NAMES}}{part}" for first, part in zip((name, *[""] * len(parts)), parts, strict=False)]
    return "\n".join(lines)


def _helpful(plan: Plan) -> tuple[str, str]:
    """What the plan's techniques save, else what the technique that would save most would do."""
    saved = dict[str, int]()
    for rule in plan.rules:
        saved[rule.strategy] = saved.get(rule.strategy, 0) + rule.saves_bytes
    most = sorted((name for name in saved if saved[name]), key=lambda name: -saved[name])
    if most:
        return "helps", ", ".join(f"{name} saves {format_bytes(saved[name])}" for name in most)
    helps = {} if plan.diagnosis is None else plan.diagnosis.helps
    name = next((name for name in helps if name not in plan.strategies), "")
    if name:
        return "less memory", f"{name}: {alone(name, helps[name])}"
    least = min(plan.candidates, key=lambda one: one.peak_bytes, default=None)
    if least is None or least.peak_bytes >= plan.predicted_peak_bytes:
        return "less memory", "none of the techniques that were compared" if least else "nothing was compared"
    where = f"{techniques(least.strategies)} on {least.data} x {least.model} ranks"
    return "less memory", f"{where}: the peak {format_bytes(least.peak_bytes)}"
