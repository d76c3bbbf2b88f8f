"""Profile of a module's step -> Plan: diagnosis, techniques, candidates, on top of what the data axis asks for.

The plan without a profile (policies/make_plan.py) comes first: S1, batch statistics, and what was registered from
outside. What the techniques of the table add to it is chosen by the bytes of the step; a plan with rules that change
modules is then counted again with them installed, which is nearly exact, and where it exceeds the budget after all a
leaner one is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.planning.modules.candidates import (
    LEAST,
    Compared,
    advice,
    as_it_is,
    asked_for,
    compare,
    missing,
    replaced_peak,
)
from lightning_amp.planning.modules.diagnosis import SHOWN, evidence, signals, where
from lightning_amp.planning.modules.seen import Draft, Seen
from lightning_amp.planning.modules.techniques import TECHNIQUES
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.module_diagnosis import ModuleDiagnosis
from lightning_amp.planning.plan.plan import Plan, Rule
from lightning_amp.planning.plan.strategies import STRATEGIES, in_order, parse_strategies
from lightning_amp.planning.policies.build_rules import BY_USER

TRIES = 4
"""Times that a plan is made leaner before everything is."""

Count = Callable[[tuple[Rule, ...]], ModuleProfile]
"""Rules -> the step's profile with them installed; raises an AmpError where a technique refuses the module."""


def diagnose_module(seen: Seen, *, ranks: int = 1, budget: int | None = None) -> ModuleDiagnosis:
    """What the profile says, and which techniques help; those that take seconds to look for, beyond a budget only."""
    profile = seen.profile
    helps, does_not_help = advice(seen, ranks=ranks, budget=budget)
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


def told_apart(
    asked: str | Sequence[str] | None, *, policy: str
) -> tuple[list[str] | None, tuple[str, ...] | None]:
    """Strategies that were asked for: those that a plan without a profile has, and those that `plan_module` adds.

    None says that a policy chooses; AMP's fixed mapping, "paper", has none of the latter.

    Raises:
        PlanError: An id that is not in the library.
    """
    if asked is None:
        return None, () if policy == "paper" else None
    ids = parse_strategies(asked if isinstance(asked, str) else list(asked))
    return [name for name in ids if name not in TECHNIQUES], tuple(name for name in ids if name in TECHNIQUES)


def plan_module(
    base: Plan,
    seen: Seen,
    *,
    named: tuple[str, ...] | None = None,
    budget_named: bool = True,
    count: Count | None = None,
) -> Plan:
    """The plan of a module whose step was profiled.

    Args:
        base: The plan without the techniques of any module, with the budget of a device.
        seen: The step.
        named: Those techniques that a person has asked for; None leaves the choice to the policy.
        budget_named: Whether a person has named the budget; else as much of what was asked for is done as can be.
        count: Counts the step again with rules installed; None leaves it at the prediction.

    Raises:
        PlanError: A technique that was named cannot be had.
    """
    budget, refused = base.budget_bytes, dict[tuple[str, ...], str]()
    limit = None if named is not None and not budget_named else budget
    for _ in range(TRIES):
        compared = _compared(seen, base, named=named, limit=limit, refused=refused)
        best = compared.best
        rules = _rules(best, named=named is not None)
        try:
            peak = _peak(seen, rules, ranks=best.ranks, count=count)
        except AmpError as error:
            if named is not None:
                raise
            refused[best.strategies] = str(error)
            continue
        over, compared = peak - best.peak_bytes, replaced_peak(compared, peak)
        if not rules or limit is None or budget is None or peak <= budget:
            break
        # the prediction was too low by so much
        limit -= max(over, 1)
    return _made(base, seen, compared, rules)


def plan_again(given: Plan, seen: Seen, *, count: Count | None = None) -> Plan:
    """A plan that was given, with the prediction for this step."""
    rules = tuple(rule for rule in given.rules if rule.strategy in TECHNIQUES)
    peak, ranks = _peak(seen, rules, ranks=given.mesh.data, count=count), given.mesh.data
    return replace(
        given,
        predicted_base_bytes=seen.held_bytes,
        predicted_stratum_bytes=0,
        predicted_peak_bytes=peak,
        diagnosis=diagnose_module(seen, ranks=ranks, budget=given.budget_bytes),
        notes=(
            *(note for note in given.notes if not note.startswith(LEAST)),
            *_missing(seen, ranks=ranks, peak=peak, budget=given.budget_bytes),
        ),
    )


def _missing(seen: Seen, *, ranks: int, peak: int, budget: int | None) -> list[str]:
    return [] if budget is None or peak <= budget else [missing(seen, ranks=ranks, budget=budget)]


def _compared(
    seen: Seen,
    base: Plan,
    *,
    named: tuple[str, ...] | None,
    limit: int | None,
    refused: dict[tuple[str, ...], str],
) -> Compared:
    ranks = base.mesh.data
    if named is not None:
        return Compared(best=asked_for(seen, named, ranks=ranks, budget=limit), candidates=(), dropped={})
    return compare(
        seen,
        ranks=ranks,
        budget=base.budget_bytes,
        limit=limit,
        base=base.strategies,
        batch_size=base.batch_size,
        refused=refused,
    )


def _peak(seen: Seen, rules: tuple[Rule, ...], *, ranks: int, count: Count | None) -> int:
    """Of the step with rules: counted with those installed that change modules, the others added to that."""
    strategies = tuple(dict.fromkeys(rule.strategy for rule in rules))
    local = tuple(rule for rule in rules if TECHNIQUES[rule.strategy].counted)
    counts = not local or count is not None
    if local and count is not None:
        seen = replace(seen, profile=count(local))
    made = as_it_is(seen, ranks)
    for name in strategies:
        if not (counts and TECHNIQUES[name].counted):
            more = TECHNIQUES[name].add(seen, made, None)
            if isinstance(more, str):
                raise PlanError(f"a plan was given with {name}, which cannot be: {more}")
            made = more
    return made.peak_bytes


def _rules(best: Draft, *, named: bool) -> tuple[Rule, ...]:
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


def _made(base: Plan, seen: Seen, compared: Compared, rules: tuple[Rule, ...]) -> Plan:
    best, order = compared.best, list(STRATEGIES)
    strategies = in_order({*base.strategies, *best.strategies})
    whole = tuple(sorted((*base.rules, *rules), key=lambda rule: order.index(rule.strategy)))
    notes = _missing(seen, ranks=best.ranks, peak=best.peak_bytes, budget=base.budget_bytes)
    notes += [] if compared.candidates else list(compared.dropped.values())
    return replace(
        base,
        strategies=strategies,
        axes=Axes.of(strategies, (rule.spec for rule in whole)),
        rules=whole,
        signals=(*base.signals, *signals(seen.profile)),
        evidence=(*base.evidence, *evidence(seen.profile)),
        predicted_base_bytes=seen.held_bytes,
        predicted_stratum_bytes=0,
        predicted_peak_bytes=best.peak_bytes,
        predicted_step_seconds=best.seconds,
        rates_device=seen.rates.device,
        candidates=compared.candidates,
        diagnosis=diagnose_module(seen, ranks=best.ranks, budget=base.budget_bytes),
        notes=(*base.notes, *_counted_on(seen.profile), *notes),
    )


def _counted_on(profile: ModuleProfile) -> list[str]:
    if not profile.reason:
        return []
    return [
        f"the step was measured with real values, for it cannot run without ({profile.reason.splitlines()[0]:.120})"
    ]
