"""Diagnose which tensors dominate the peak of a module's step, and turn the chosen draft into a Plan.

    LARGE_PARAMETERS      parameters, gradients, optimiser state       a third of the peak, or its largest part
    ONE_LARGE_TENSOR      one tensor, with those of its shape from the same module                the same
    MANY_SAVED_TENSORS    other tensors saved for the backward pass                               the same
    LARGE_HEAD            logits, and the loss's tensors of their size                            the same

A technique helps if it reduces the predicted peak by the share `WORTH` (candidates.py). For a technique that does not
help, the diagnosis names the part of the peak that it does not reduce.
"""

from dataclasses import replace

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.module_profile import ACTIVATIONS, PHASES, ModuleProfile
from lightning_amp.planning.base.rules import BY_USER
from lightning_amp.planning.modules.candidates import Compared, advice
from lightning_amp.planning.modules.min_memory_plan import LEAST, missing
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Explanation, ModuleDiagnosis, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.data.row import DataParallel
from lightning_amp.techniques.host_memory.limit import host_bytes_of
from lightning_amp.techniques.table import PREDICTIONS, in_order, rules_in_order
from lightning_amp.techniques.technique import UNEXPECTED

SHARE = 1 / 3
"""Share of the peak from which a part raises its signal."""
SHOWN = 8
"""Number of modules in a diagnosis."""
SIGNALS = {
    "parameters": "LARGE_PARAMETERS",
    "tensor": "ONE_LARGE_TENSOR",
    "saved": "MANY_SAVED_TENSORS",
    "head": "LARGE_HEAD",
}


def diagnose_module(
    seen: ProfiledStep,
    *,
    ranks: int = 1,
    budget: int | None = None,
    stages: Draft | None = None,
    compared: bool = False,
) -> ModuleDiagnosis:
    """Diagnose the step, and list which techniques help.

    Techniques whose search takes seconds are skipped if the step fits, except for `stages` that are drafted already,
    and stages that may be faster if plans are `compared`.
    """
    profile = seen.profile
    helps, does_not_help = advice(seen, ranks=ranks, budget=budget, stages=stages, compared=compared)
    return ModuleDiagnosis(
        largest=profile.largest,
        evidence=(*evidence(profile), *where(profile)),
        helps=helps,
        does_not_help=does_not_help,
        peak_bytes=profile.peak_bytes,
        parts=dict(profile.parts),
        modules={row.fqn: row.n_bytes for row in profile.modules[:SHOWN]},
        measured=profile.measured,
        reason=profile.reason,
    )


def signals(profile: ModuleProfile) -> tuple[str, ...]:
    """Return the names of the raised signals."""
    return tuple(name for part, name in SIGNALS.items() if _raised(profile, part))


def evidence(profile: ModuleProfile) -> tuple[str, ...]:
    """Return one sentence per signal, raised or not: "MANY_SAVED_TENSORS: 5.31 MiB, 72 % of the peak, ..."."""
    kinds, n = profile.by_kind, sum(row.by_kind[ACTIVATIONS] > 0 for row in profile.modules)
    modules = "1 module" if n == 1 else f"{n} modules"
    details = {
        "parameters": "parameters {parameters}, gradients {gradients}, optimiser state {optimiser state}".format(
            **{kind: format_bytes(n_bytes) for kind, n_bytes in kinds.items()}
        ),
        "tensor": "the largest tensor that is no parameter, with those of its shape that its module makes",
        "saved": f"tensors of {modules} that the forward pass leaves to the backward pass",
        "head": "logits, and what the loss makes of them",
    }
    found = []
    for part, name in SIGNALS.items():
        sign = "more than a third" if _raised(profile, part) else "less than a third"
        sign = "the largest part" if part == profile.largest else sign
        found.append(f"{name}: {_part_of(profile, profile.parts[part])}, {details[part]} ({sign})")
    return tuple(found)


def where(profile: ModuleProfile) -> tuple[str, ...]:
    """Return where in the step the peak is, and which module and tensor hold most of it."""
    at = f" of {profile.peak_module}" if profile.peak_module else ""
    said = [f"the peak of {format_bytes(profile.peak_bytes)} is in the {PHASES[profile.peak_phase]}{at}"]
    if profile.modules:
        most = profile.modules[0]
        said.append(f"{called(most.fqn)} holds most of it: {_part_of(profile, most.n_bytes)}")
    if profile.tensors:
        tensor = profile.tensors[0]
        said.append(
            f"the largest tensor is {tensor.name} of {called(tensor.fqn)}, {list(tensor.shape)} {tensor.dtype}:"
            f" {_part_of(profile, tensor.n_bytes)}"
        )
    return tuple(said)


def called(fqn: str) -> str:
    """Return a readable name of a module; the name of the LightningModule itself is empty."""
    return fqn or "the module itself"


def _raised(profile: ModuleProfile, part: str) -> bool:
    return part == profile.largest or profile.parts[part] >= SHARE * profile.peak_bytes


def _part_of(profile: ModuleProfile, n_bytes: int) -> str:
    return f"{format_bytes(n_bytes)}, {100 * n_bytes / max(1, profile.peak_bytes):.0f} % of the peak"


def on_model_axis(base: Plan, model: int) -> Plan:
    """Move `model` ranks from the data axis of a plan to its model axis."""
    data = base.mesh.data // model
    noun = "rank" if data == 1 else "ranks"
    rules = tuple(
        replace(rule, why=f"{data} {noun} on the data axis") if isinstance(rule.spec, DataParallel) else rule
        for rule in base.rules
    )
    return replace(base, mesh=MeshShape(data=data, model=model), rules=rules)


def missing_bytes(seen: ProfiledStep, best: Draft, budget: int | None) -> list[str]:
    """Return a note on the memory that a plan lacks; empty if it fits."""
    fits = budget is None or best.peak_bytes <= budget
    # an Explanation, because the error or the warning of a plan that does not fit has the same text
    return [] if fits else [Explanation(missing(seen, best, budget=budget or 0))]


def kept_notes(given: Plan, seen: ProfiledStep) -> list[str]:
    """Return the notes of a given plan, and those on this step."""
    before = [note for note in given.notes if not note.startswith(LEAST)]
    return [*before, *(note for note in notes_of(seen) if note not in before)]


def notes_of(seen: ProfiledStep) -> list[str]:
    """Return notes on how the step was counted, and on the meaning of a sample if the batch length is not known."""
    one = "the tensors of the batch have no length in common, so that all of it counts as one sample"
    return [*seen.notes, *[one] * (seen.profile.batch_size is None)]


def held_bytes(seen: ProfiledStep, made: Draft) -> int:
    """Return the bytes that the fullest rank keeps between steps."""
    return seen.held_bytes if made.held_bytes is None else made.held_bytes


def rules_of(best: Draft, *, named: bool) -> tuple[Rule, ...]:
    """Return the rules of a draft; `named` means that the user requested its techniques."""
    return tuple(replace(target, why=f"{BY_USER} ({target.why})") if named else target for target in best.targets)


def of_fullest(plan: Plan, made: Draft) -> tuple[Plan, Draft]:
    """Set the budget of a plan to the memory of its fullest rank, and the peak of a draft to all bytes of that rank."""
    # drafts are compared with the least memory of all ranks, minus what each rank has in addition; the report shows the
    # rank with the least room and its memory, which need not be the least
    whole = replace(made, peak_bytes=made.peak_bytes + made.more_bytes, more_bytes=0)
    budget = plan.budget_bytes
    return (plan if budget is None else replace(plan, budget_bytes=budget + made.more_bytes)), whole


def finished(base: Plan, seen: ProfiledStep, compared: Compared, rules: tuple[Rule, ...]) -> Plan:
    """Turn the best draft into a plan, on top of the rules of `base`."""
    base, best = of_fullest(base, compared.best)
    notes = notes_of(seen)
    if best.model not in (1, base.mesh.model):
        ranks, model = base.mesh.data, best.model
        data = ranks // model
        notes.append(
            f"{model} stages share a batch, so a step takes {data} batch{'es' * (data > 1)} of the loader, where"
            f" {ranks} ranks of a data axis take {ranks}; a batch {model} times as large keeps the samples of a step"
        )
        base = on_model_axis(base, model)
    strategies = in_order({*base.strategies, *best.strategies})
    whole = rules_in_order((*base.rules, *rules))
    fits = base.budget_bytes is None or best.peak_bytes <= base.budget_bytes
    for name, prediction in PREDICTIONS.items():
        # of a plan that does not fit, also what was left out of the search for a technique that it does not have
        if prediction.notes is not None and (name in best.strategies or not fits):
            notes += map(Explanation, prediction.notes(seen))
    if host_bytes := host_bytes_of(whole):
        notes.append(f"each rank takes {format_bytes(host_bytes)} of host memory")
    notes += missing_bytes(seen, best, base.budget_bytes)
    failed = [why for names, why in compared.dropped.items() if len(names) == 1 and UNEXPECTED in why]
    notes += failed if compared.candidates else list(compared.dropped.values())
    return replace(
        base,
        strategies=strategies,
        axes=Axes.of(strategies, (rule.spec for rule in whole)),
        rules=whole,
        signals=(*base.signals, *signals(seen.profile)),
        evidence=(*base.evidence, *evidence(seen.profile)),
        predicted_base_bytes=held_bytes(seen, best),
        predicted_stratum_bytes=0,
        predicted_peak_bytes=best.peak_bytes,
        predicted_step_seconds=best.seconds,
        rates_device=seen.rates.device,
        candidates=compared.candidates,
        diagnosis=diagnose_module(
            seen,
            ranks=best.ranks * best.model,
            budget=base.budget_bytes,
            stages=best if best.stages else None,
            compared=bool(compared.candidates),
        ),
        stages=best.stages,
        notes=(*base.notes, *notes),
    )
