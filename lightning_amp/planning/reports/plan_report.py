"""A profile and a plan as text of at most 80 columns."""

import re
from collections.abc import Sequence
from textwrap import TextWrapper, wrap

from lightning_amp.planning.plan.plan import Candidate, Plan
from lightning_amp.planning.plan.strategies import label
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import format_bytes, format_seconds

WIDTH = 80
SHOWN_FITTING, SHOWN_DROPPED = 7, 3
"""Candidates in the text: the chosen one with the best that fit, and the best of those that do not."""
NARROWEST = 12
"""Of a column that is wrapped."""


class _Wrapper(TextWrapper):
    """Breaks the names of modules after a dot."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<=\w\w\.)(?=[a-zA-Z_])")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns that line up, the last one wrapped to the width; numbers are aligned by the caller's formatting."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header) - 1)]
    left = sum(widths) + 2 * len(widths)
    last = max(len(str(row[-1])) for row in [header, *rows])
    lines = []
    for row in [header, ["-" * w for w in widths] + ["-" * max(4, min(last, WIDTH - left))], *rows]:
        first = "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=False))
        parts = _Wrapper(max(NARROWEST, WIDTH - left), break_on_hyphens=False).wrap(str(row[-1])) or [""]
        lines += [f"{first}  {parts[0]}".rstrip(), *(" " * left + part for part in parts[1:])]
    return "\n".join(lines)


def profile_report(profile: Profile) -> str:
    """The data, one row per modality."""
    rows = []
    for m in profile.modalities:
        parts = m.decomposition
        detail = ""
        if parts is not None:
            keys = "attention" if parts.attention else "convolution"
            detail = f"{parts.anchors:,} anchors, {parts.strata} strata, {keys} keys"
        rows.append(
            [
                m.name,
                m.probability_model,
                f"{m.cells:,}",
                f"{m.features:,}",
                "-" if m.zeros is None else f"{100 * m.zeros:.1f} %",
                "-" if m.scale is None else f"{m.scale:.2f} x",
                detail,
            ]
        )
    text = table(["modality", "model", "cells", "features", "zeros", "scale", "decoder"], rows)
    graph = profile.graph
    line = (
        f"guidance graph: {graph.vertices:,} vertices, {graph.edges:,} edges"
        if graph
        else "no guidance graph"
    )
    return f"Profile of {profile.data_dir}\n\n{text}\n\n{line}"


def plan_report(plan: Plan) -> str:
    """Signals, strategies, rules, prediction against budget and mesh."""
    raised = [[e.partition(": ")[0], _mark(e, plan), e.partition(": ")[2]] for e in plan.evidence]
    sections = []
    if raised:
        sections.append(table(["signal", "raised", "evidence"], raised))
    rules = [
        [
            rule.strategy,
            type(rule.spec).__name__,
            format_bytes(rule.saves_bytes) if rule.saves_bytes else "-",
            rule.why,
        ]
        for rule in plan.rules
    ]
    sections.append(table(["", "technique", "saves", "why"], rules) if rules else "nothing to install")
    sections.append("\n".join(_prediction(plan)))
    if plan.candidates:
        sections.append(candidate_table(plan.candidates, budget=plan.budget_bytes))
    notes = [*plan.notes, *([shortfall(plan)] if plan.fits is False else [])]
    sections += ["\n".join(wrap(f"- {note}", WIDTH, subsequent_indent="  ")) for note in notes]
    names = ", ".join(map(label, plan.strategies)) or "single-device execution"
    return "\n".join(wrap(f"Plan (policy {plan.policy}): {names}", WIDTH)) + "\n\n" + "\n\n".join(sections)


def candidate_table(candidates: Sequence[Candidate], *, budget: int | None) -> str:
    """The best of what was compared: the chosen one, others that fit, and some that need too much memory."""
    dropped = [c for c in candidates[1:] if budget is not None and c.peak_bytes > budget]
    kept = candidates[: len(candidates) - len(dropped)]
    n_dropped = max(SHOWN_DROPPED, SHOWN_FITTING + SHOWN_DROPPED - len(kept))
    n_kept = max(SHOWN_FITTING, SHOWN_FITTING + SHOWN_DROPPED - len(dropped))
    rows = [
        [
            c.verdict.partition(",")[0],
            f"{c.data} x {c.model}",
            format_bytes(c.peak_bytes),
            format_seconds(c.step_seconds),
            format_seconds(c.cell_seconds),
            techniques(c.strategies),
        ]
        for c in (*kept[:n_kept], *dropped[:n_dropped])
    ]
    text = table(["verdict", "mesh", "peak", "step", "per cell", "techniques"], rows)
    more = [max(0, len(kept) - n_kept), max(0, len(dropped) - n_dropped)]
    if not any(more):
        return text
    which = [f"{more[0]:,} that fit"] if budget is not None and more[0] else []
    which += [f"{more[1]:,} that exceed {format_bytes(budget)}"] if budget is not None and more[1] else []
    found = ": ".join([f"and {sum(more):,} more", *filter(None, [", ".join(which)])])
    return "\n".join([text, *wrap(f"{found}; --format json has all", WIDTH)])


def techniques(strategies: Sequence[str]) -> str:
    """Ids without S1, which the mesh says."""
    return " ".join(s for s in strategies if s != "S1") or "none"


def shortfall(plan: Plan) -> str:
    """Say where a plan that does not fit is predicted to run out of memory, and what helps."""
    stratum = plan.fails_at_stratum
    known = "in the backward pass" if plan.strata_bytes else "without the activations, which are not known,"
    where = known if stratum is None else f"at stratum {stratum}"
    return (
        f"predicted to run out of memory {where}: {format_bytes(plan.predicted_peak_bytes)} per rank of"
        f" {format_bytes(plan.budget_bytes or 0)}; use smaller batches, more or larger devices, or other strategies"
    )


def _mark(evidence: str, plan: Plan) -> str:
    return "yes" if evidence.split(": ", 1)[0] in plan.signals else "no"


def _prediction(plan: Plan) -> list[str]:
    budget = "unknown" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    verdict = {True: "fits", False: "does NOT fit", None: "not compared"}[plan.fits]
    size, mesh = format_bytes(plan.predicted_peak_bytes), plan.mesh
    if plan.strata_bytes:
        each = f"{len(plan.strata_bytes)} x {format_bytes(plan.predicted_stratum_bytes)}"
        rows = [("predicted peak per rank", f"{size} of {budget} ({verdict})")]
        rows += [("base + strata x each", f"{format_bytes(plan.predicted_base_bytes)} + {each}")]
    else:
        known = "weights, gradients, optimiser state and what is known of the activations"
        rows = [("predicted peak per rank", f"unknown, at least {size} of {budget}: {known}")]
    cells = "1 cell" if plan.batch_size == 1 else f"{plan.batch_size} cells"
    rows.append(("mesh", f"{mesh.data} data x {mesh.model} model, {cells} per rank and step"))
    if plan.predicted_step_seconds is not None:
        rows.append(("predicted step", step_text(plan)))
        rows += [("", f"rates of {plan.rates_device}")] if plan.rates_device else []
    wrapped = [(name, wrap(value, WIDTH - 24)) for name, value in rows]
    return [("\n" + " " * 24).join([name.ljust(24) + lines[0], *lines[1:]]) for name, lines in wrapped]


def step_text(plan: Plan) -> str:
    """The predicted time of a step, as far as it is known: "48.0 ms, of which the decoder 18.8 ms"."""
    decoder, rest = plan.predicted_step_seconds or 0.0, plan.predicted_rest_seconds
    if rest is None:
        return f"{format_seconds(decoder)} for the decoder only; the rest is not known"
    return f"{format_seconds(decoder + rest)}, of which the decoder {format_seconds(decoder)}"
