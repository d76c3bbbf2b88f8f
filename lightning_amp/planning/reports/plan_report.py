"""Format a profile and a plan as text of at most 80 columns, and a plan as a summary of five lines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from textwrap import wrap
from typing import Any

from lightning_amp.costs.device_memory import TENSORS_SHARE
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.data.files.directory import MODALITIES
from lightning_amp.planning.modules.min_memory_plan import LEAST
from lightning_amp.planning.plan.device_bytes import DeviceBytes
from lightning_amp.planning.plan.plan import Candidate, Explanation, Plan, Validation
from lightning_amp.planning.reports.module_report import alone, diagnosis_sections, shortened
from lightning_amp.planning.reports.stages_report import stages_section
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.table import label, technique_of_steps
from lightning_amp.text_table import WIDTH, table

SHOWN = 10
"""Candidates in the text; of more candidates, only useful alternatives are shown."""
LESS = 0.98
"""Largest peak of a slower candidate that is shown, relative to those of faster ones."""
NAMES = 16
"""Width of the names of lines in a summary, in columns."""


def profile_report(profile: Profile) -> str:
    """Format the data, one row per modality."""
    rows = []
    for m in profile.modalities:
        parts = m.decomposition
        detail = ""
        if parts is not None:
            keys = "full attention" if parts.full else "attention" if parts.attention else "convolution"
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
    header = ["modality", "model", "cells", "features", "zeros", "scale", "decoder"]
    text = table(header, rows) if rows else "no modality that is known"
    graph = profile.graph
    line = f"guidance graph: {graph.vertices:,} vertices, {graph.edges:,} edges" if graph else "no guidance graph"
    if profile.unread:
        known = ", ".join(MODALITIES)
        names = ", ".join(profile.unread)
        line += "\n" + "\n".join(wrap(f"not read, because its modality is none of {known}: {names}", WIDTH))
    return f"Profile of {profile.data_dir}\n\n{text}\n\n{line}"


def plan_report(plan: Plan) -> str:
    """Format signals, strategies, rules, and the prediction with budget and mesh."""
    said = [e.partition(": ") for e in plan.evidence]
    raised = [[signal, "yes" if signal in plan.signals else "no", evidence] for signal, _, evidence in said]
    sections = []
    if raised:
        sections.append(table(["signal", "raised", "evidence"], raised))
    if plan.diagnosis is not None:
        sections += diagnosis_sections(plan.diagnosis)
    rules = [
        [
            rule.strategy,
            type(rule.spec).__name__,
            format_bytes(rule.saves_bytes) if rule.saves_bytes else "-",
            f"{names}: {rule.why}" if names else rule.why,
        ]
        for rule, names in _alike(plan)
    ]
    sections.append(table(["", "technique", "saves", "why"], rules) if rules else "nothing to install")
    sections += [stages_section(plan)] if plan.stages else []
    sections.append("\n".join(_prediction(plan)))
    if plan.candidates:
        sections.append(candidate_table(plan))
    sections += note_lines(plan)
    heading = "\n".join(wrap(f"Plan (policy {plan.policy}): {labels(plan)}", WIDTH))
    return "\n\n".join([heading, *sections])


def note_lines(plan: Plan) -> list[str]:
    """Return the plan's notes, followed by the missing bytes if it does not fit."""
    notes = [note for note in plan.notes if not note.startswith(LEAST)]
    notes += [shortfall(plan)] if plan.fits is False else []
    notes += [] if plan.on_device is None else device_notes(plan.on_device)
    return ["\n".join(wrap(f"- {note}", WIDTH, subsequent_indent="  ")) for note in notes]


def device_notes(found: DeviceBytes) -> list[str]:
    """Say what is beside the allocator, and how what is reserved was found."""
    how = "what is reserved was found by a replay of the step in torch's allocator, with cuBLAS's workspaces"
    if found.estimated:
        share = 100 - 100 * TENSORS_SHARE
        how = (
            f"what is reserved is estimated as the tensors, {share:.0f} % for fragments and cuBLAS's workspaces, not"
            f" replayed: {found.estimated}"
        )
    elif found.given_back:
        how += "; free segments go back to the device when it is full, which takes time"
    sources = {"context": "context_bytes"} | ({"NCCL": "nccl_bytes"} if found.nccl_bytes else {})
    said = ", ".join(f"{what} {'measured' if n in found.measured else 'by default'}" for what, n in sources.items())
    return [f"on the device: {how}; {said}"]


def labels(plan: Plan) -> str:
    """Return the names of the plan's techniques in words."""
    return ", ".join(map(label, plan.strategies)) or "single-device execution"


# printing shows the report; set here, because plans and profiles must not import reports
Profile.__str__ = profile_report  # type: ignore[method-assign, assignment]
Plan.__str__ = plan_report  # type: ignore[method-assign, assignment]


def _alike(plan: Plan) -> list[tuple[Rule, str]]:
    """Merge rules that are the same for several blocks of a module's plan, and list the blocks' names."""
    if plan.diagnosis is None and not plan.evaluates:
        return [(rule, "") for rule in plan.rules]
    groups: dict[tuple[str, Spec, str], list[Rule]] = {}
    for rule in plan.rules:
        groups.setdefault((rule.strategy, rule.spec, rule.why), []).append(rule)
    return [
        (
            replace(rules[0], saves_bytes=sum(rule.saves_bytes for rule in rules)),
            shortened([rule.fqn for rule in rules if rule.fqn not in ("", "*")]),
        )
        for rules in groups.values()
    ]


def candidate_table(plan: Plan) -> str:
    """Format the compared plans: all if few, else those that no other one beats, and the step without techniques."""
    budget, candidates = plan.budget_bytes, plan.candidates
    shown = shown_candidates(candidates)
    rows = [
        [
            c.verdict.partition(",")[0],
            f"{c.data} x {c.model}",
            format_bytes(c.peak_bytes),
            format_seconds(c.step_seconds),
            format_seconds(c.cell_seconds),
            techniques(c.strategies),
        ]
        for c in shown
    ]
    # candidates of a decoder exclude the time outside of the decoder, which is the same for all
    timed = "decoder" if plan.strata_bytes else "step"
    text = table(["verdict", "mesh", "peak", timed, f"per {sample_word(plan)}", "techniques"], rows)
    if len(shown) == len(candidates):
        return text
    fits = ""
    if budget is not None:
        fits = f"; {sum(c.peak_bytes <= budget for c in candidates):,} fit {format_bytes(budget)}"
    more = f"the best of {len(candidates):,} by time and memory{fits}; --format json has all"
    return "\n".join([text, *wrap(more, WIDTH)])


def shown_candidates(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Select candidates to show: all if there are few, else only useful alternatives.

    Of many, these are the chosen one, then by time those that require less memory than all faster ones, and last the
    step without techniques.
    """
    if len(candidates) <= SHOWN:
        return candidates
    chosen = candidates[0]
    found, least = [chosen], inf
    for one in sorted(candidates, key=lambda c: (c.cell_seconds, c.peak_bytes)):
        if one.peak_bytes > LESS * least:
            continue
        least = one.peak_bytes
        # a candidate that is close to the chosen one in time and memory is not a useful alternative
        if max(_ratio(one.peak_bytes, chosen.peak_bytes), _ratio(one.cell_seconds, chosen.cell_seconds)) > 1 / LESS:
            found.append(one)
    plain = next((c for c in candidates if techniques(c.strategies) == "none"), None)
    return [*found[: SHOWN - 1], plain] if plain is not None and plain not in found else found[:SHOWN]


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


def techniques(strategies: Sequence[str]) -> str:
    """Join strategy ids without S1, which the mesh implies."""
    return " ".join(s for s in strategies if s != "S1") or "none"


def shortfall(plan: Plan) -> str:
    """Say where a plan that does not fit is predicted to run out of memory, and what helps."""
    if plan.evaluates:
        how = "" if technique_of_steps(plan.strategies) else " at least, in chunks"
        return (
            f"{plan.evaluates} is predicted to need {format_bytes(plan.predicted_peak_bytes)}{how}, of"
            f" {format_bytes(plan.budget_bytes or 0)}; allow that much, or use smaller batches"
        )
    if plan.largest_phase == "validation_step" and plan.validation is not None:
        return _of_validation(plan, plan.validation)
    stratum = plan.fails_at_stratum
    whole = plan.strata_bytes or plan.diagnosis is not None
    known = "in the step" if plan.diagnosis is not None else "in the backward pass"
    known = known if whole else "without the activations, which are not known"
    where = known if stratum is None else f"at stratum {stratum}"
    return f"predicted to run out of memory {where}: {_taken(plan)}; {remedy(plan)}"


def _taken(plan: Plan) -> str:
    """Format what a rank takes of its budget."""
    tensors = format_bytes(plan.predicted_peak_bytes)
    if plan.on_device is None:
        return f"{tensors} per rank of {format_bytes(plan.budget_bytes or 0)}"
    return f"{tensors} of tensors per rank; on the device {plan.on_device.in_words()}"


def remedy(plan: Plan) -> str:
    """Say what would fit, for a plan that does not."""
    others = "use smaller batches, more or larger devices, or other strategies"
    others = f"{plan.uncounted}; {others}" if plan.uncounted else others
    said = (note for note in plan.notes if note.startswith(LEAST) and plan.diagnosis is not None)
    return next(said, others)


def plan_as_json(plan: Plan, answers: Mapping[str, Any]) -> str:
    """Return the plan as JSON, with what would help, and answers or null for each.

    Args:
        answers: The largest batch, the fewest devices and the largest length, as far as they were asked for.
    """
    helps = {} if plan.diagnosis is None else plan.diagnosis.helps
    others = {name: effect for name, effect in helps.items() if name not in plan.strategies}
    would = {"said": remedy(plan), "techniques": others} if plan.fits is False else None
    unanswered = dict.fromkeys(("largest_batch", "fewest_devices", "largest_length"))
    return plan.to_json({"would_help": would, **unanswered, **answers})


def _of_validation(plan: Plan, found: Validation) -> str:
    """Say that the validation of a fit does not fit, and the largest batch that does."""
    kept = f"{'in chunks, ' if found.rules else ''}with the optimiser state of training"
    if found.largest_batch:
        about = "about " if found.rules else ""
        help_ = f"the largest validation batch that fits is {about}{found.largest_batch:,}, of {found.batch_size:,}"
        help_ += "" if found.loader is None else f" (loader {found.loader})"
    elif found.largest_batch == 0:
        help_ = "no validation batch fits, not even of 1 sample; allow that much, or use more devices"
    else:
        help_ = "allow that much, or use smaller validation batches"
    return (
        f"validation_step is predicted to need {format_bytes(found.peak_bytes)} at least {kept}, of"
        f" {format_bytes(plan.budget_bytes or 0)}, and a training step {format_bytes(found.training_bytes)}; {help_}"
        + (f". Chunks are not possible: {found.no_chunks}" if found.no_chunks else "")
    )


def _prediction(plan: Plan) -> list[str]:
    mesh, peak = plan.mesh, peak_text(plan)
    base, rows = format_bytes(plan.predicted_base_bytes), [("predicted peak per rank", peak)]
    if (found := plan.validation) is not None:
        rows += [("in training", format_bytes(found.training_bytes))]
        rows += [("in validation", format_bytes(found.peak_bytes) + (", in chunks" if found.rules else ""))]
    if plan.evaluates:
        rows = [(f"peak of {plan.evaluates}", peak), ("parameters and batch", base)]
    elif plan.strata_bytes:
        n, each = len(plan.strata_bytes), plan.predicted_stratum_bytes
        rest = max(0, plan.predicted_peak_bytes - plan.predicted_base_bytes - n * each)
        parts = f"{base} base + {n} strata x {format_bytes(each)}"
        rows.append(("", f"= {parts} + {format_bytes(rest)} of temporaries"))
    elif plan.diagnosis is not None:
        rows.append(("kept between steps", f"{base} of parameters, gradients and optimiser state"))
    rows.append(("mesh", f"{mesh.data} data x {mesh.model} model, {batch_text(plan)} per rank and step"))
    if plan.predicted_step_seconds is not None:
        rows.append(("predicted step", step_text(plan)))
        rows += [("", f"rates of {plan.rates_device}")] if plan.rates_device else []
    wrapped = [(name, wrap(value, WIDTH - 24)) for name, value in rows]
    return [("\n" + " " * 24).join([name.ljust(24) + lines[0], *lines[1:]]) for name, lines in wrapped]


def peak_text(plan: Plan) -> str:
    """Format the predicted peak of a rank and its budget: "8.54 MiB of 23.5 GiB (fits)"."""
    budget = "unknown" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    size = f"{format_bytes(plan.predicted_peak_bytes)} of {budget}"
    if plan.on_device is not None:
        size = f"{format_bytes(plan.predicted_peak_bytes)}; on the device {plan.on_device.in_words()}"
    if plan.diagnosis is not None and plan.uncounted:
        return f"unknown, at least {size}: {plan.uncounted}"
    if plan.diagnosis is None and not plan.evaluates and not plan.strata_bytes:
        known = "weights, gradients, optimiser state and what is known of the activations"
        return f"unknown, at least {size}: {known}"
    verdict = {True: "fits", False: "does NOT fit", None: "not compared"}[plan.fits]
    return f"{size} ({verdict}{', in validation_step' if plan.largest_phase == 'validation_step' else ''})"


def batch_text(plan: Plan) -> str:
    """Format the batch of a rank: cells for a model with a Hi-C decoder, else samples."""
    return f"{plan.batch_size:,} {sample_word(plan)}{'s' * (plan.batch_size != 1)}"


def sample_word(plan: Plan) -> str:
    """Return the word for a row of a batch."""
    return "cell" if plan.strata_bytes else "sample"


def step_text(plan: Plan) -> str:
    """Format the predicted time of a step, as far as it is known: "48.0 ms, of which the decoder 18.8 ms"."""
    decoder, rest = plan.predicted_step_seconds or 0.0, plan.predicted_rest_seconds
    if not plan.strata_bytes:
        return format_seconds(decoder)
    if rest is None:
        return f"{format_seconds(decoder)} for the decoder only; the rest is not known"
    return f"{format_seconds(decoder + rest)}, of which the decoder {format_seconds(decoder)}"


def plan_summary(plan: Plan, *, report: str = "") -> str:
    """Format the summary of five lines, and every note that is a warning; long texts continue in the next line.

    Args:
        report: File with the full report; "" if none is written.
    """
    mesh = plan.mesh
    ranks = f" on {mesh.data} data x {mesh.model} model ranks" if mesh.ranks > 1 else ""
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
        # a path is not broken, however long it is, so that it can be copied
        parts = wrap(text, WIDTH - NAMES, break_long_words=False, break_on_hyphens=False)
        lines += [f"{first:<{NAMES}}{part}" for first, part in zip((name, *[""] * len(parts)), parts, strict=False)]
    return "\n".join(lines)


def _helpful(plan: Plan) -> tuple[str, str]:
    """Return what the plan's techniques save, else what the technique that would save most would do."""
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
    if least is None or least.peak_bytes >= plan.training_bytes:
        return "less memory", "none of the techniques that were compared" if least else "nothing was compared"
    where = f"{techniques(least.strategies)} on {least.data} x {least.model} ranks"
    return "less memory", f"{where}: the peak {format_bytes(least.peak_bytes)}"
