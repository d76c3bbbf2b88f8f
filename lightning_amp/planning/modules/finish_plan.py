"""Turn the draft that was chosen for a module into a Plan, with its rules, predictions and notes."""

from dataclasses import replace

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.planning.modules.candidates import Compared
from lightning_amp.planning.modules.diagnosis import diagnose_module, evidence, signals
from lightning_amp.planning.modules.min_memory_plan import LEAST, missing
from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.policies.build_rules import BY_USER
from lightning_amp.techniques.chunk.row import forms_of
from lightning_amp.techniques.data.row import DataParallel
from lightning_amp.techniques.table import STRATEGIES, in_order


def on_model_axis(base: Plan, model: int) -> Plan:
    """The plan of all ranks on the data axis with so many on the model axis."""
    data = base.mesh.data // model
    noun = "rank" if data == 1 else "ranks"
    rules = tuple(
        replace(rule, why=f"{data} {noun} on the data axis") if isinstance(rule.spec, DataParallel) else rule
        for rule in base.rules
    )
    return replace(base, mesh=MeshShape(data=data, model=model), rules=rules)


def _shared(ranks: int, model: int) -> str:
    """What becomes of the samples of a step when ranks of the data axis become stages."""
    data = ranks // model
    return (
        f"{model} stages share a batch, so a step takes {data} batch{'es' * (data > 1)} of the loader, where {ranks}"
        f" ranks of a data axis take {ranks}; a batch {model} times as large keeps the samples of a step"
    )


def missing_bytes(seen: ProfiledStep, best: Draft, budget: int | None) -> list[str]:
    """What a plan requires that does not fit, as a note; nothing where it fits."""
    fits = budget is None or best.peak_bytes <= budget
    # the refusal or the warning of a plan that does not fit has it too
    return [] if fits else [Explanation(missing(seen, best, budget=budget or 0))]


def kept_notes(given: Plan, seen: ProfiledStep) -> list[str]:
    """What was said of a plan that was given, with notes on this step."""
    before = [note for note in given.notes if not note.startswith(LEAST)]
    return [*before, *(note for note in seen.notes if note not in before)]


def held_bytes(seen: ProfiledStep, made: Draft) -> int:
    """Bytes that the fullest rank keeps between steps."""
    return seen.held_bytes if made.held_bytes is None else made.held_bytes


def rules_of(best: Draft, *, named: bool) -> tuple[Rule, ...]:
    """The rules of a draft; with the word that a person has `named` its techniques."""
    return tuple(
        Rule(
            fqn=target.fqn,
            spec=target.spec,
            strategy=target.strategy,
            why=f"{BY_USER} ({target.why})" if named else target.why,
            saves_bytes=target.saves_bytes,
        )
        for target in best.targets
    )


def of_fullest(plan: Plan, made: Draft) -> tuple[Plan, Draft]:
    """A plan with the memory of the fullest rank as its budget, and a draft with all bytes of that rank."""
    whole = replace(made, peak_bytes=made.peak_bytes + made.more_bytes, more_bytes=0)
    budget = plan.budget_bytes
    return (plan if budget is None else replace(plan, budget_bytes=budget + made.more_bytes)), whole


def finished(base: Plan, seen: ProfiledStep, compared: Compared, rules: tuple[Rule, ...]) -> Plan:
    """The plan of the best draft, on top of the rules that `base` has."""
    order = list(STRATEGIES)
    base, best = of_fullest(base, compared.best)
    notes = [*seen.notes]
    if best.model not in (1, base.mesh.model):
        notes.append(_shared(base.mesh.data, best.model))
        base = on_model_axis(base, best.model)
    strategies = in_order({*base.strategies, *best.strategies})
    whole = tuple(sorted((*base.rules, *rules), key=lambda rule: order.index(rule.strategy)))
    forms = forms_of(seen)
    if "chunk" in best.strategies and forms is not None and forms.known and forms.thinned:
        thinned = forms.thinned[0]
        notes.append(Explanation(f"{thinned!r} has more regions that could run in chunks than are compared"))
    notes += missing_bytes(seen, best, base.budget_bytes)
    notes += [] if compared.candidates else list(compared.dropped.values())
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
