"""Plan a module with a Hi-C decoder: the decoder's techniques by closed forms, and its whole step by counts.

    1. make the policy's plan of the decoder for the budget (policies/make_plan.py)
    2. count the step with the techniques of that plan, and plan the rest as of any module (plan_module.py)
    3. do the same with a leaner plan of the decoder if the count exceeds the budget, or with a faster one that may fit,
       for closed forms can predict more than is counted: the faster of both is taken, or if neither fits, the leaner

Steps are counted as one rank of the model axis, the fullest, with all rules of the decoder.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from lightning_amp.costs.device_rates import Links
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import TIE, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.planning.modules.candidates import as_it_is
from lightning_amp.planning.modules.min_memory_plan import LEAST
from lightning_amp.planning.modules.plan_module import Count, plan_again, plan_module
from lightning_amp.planning.plan.plan import Axes, Candidate, Plan
from lightning_amp.planning.time.step_seconds import decoder_seconds
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import (
    PREDICTIONS,
    STRATEGIES,
    beyond_decoder,
    in_order,
    is_of_decoder,
    rules_in_order,
)

AT_ONCE = Links(intra_bandwidth=inf, inter_bandwidth=inf, latency=0.0, ranks_per_node=1)
TRIES = 3
"""Number of other plans of the decoder that are counted, until one fits and none is faster."""
OVER = 1.02
"""Closed forms of plans are at most this factor above their counts, but for what lies outside: 1.019 was seen."""
Make = Callable[[int | None], Plan]
"""Maps a budget in bytes to the plan of the decoder alone, by closed forms; no plan fits 1 byte, so it needs least."""
OnTopOf = Callable[[tuple[Rule, ...], int], tuple[ProfiledStep, Count]]
"""(rules of the decoder, ranks of the model axis) -> the step that is counted so, and what counts it with further
rules."""


def plan_decoder(
    make: Make,
    on_top_of: OnTopOf,
    shape: ModelShape,
    *,
    budget: int | None,
    named: tuple[str, ...] | None = None,
    budget_named: bool = True,
) -> tuple[Plan, ProfiledStep | None]:
    """Plan a module with a decoder.

    Args:
        shape: Sizes of the module.
        named: Techniques beyond the decoder that the user requested; None leaves all techniques to the policy.
        budget_named: Whether the user set the budget; if not, requested techniques are applied as much as possible.

    Returns:
        The plan, and the step with the techniques of its decoder; None if it could not be counted, and the plan has
        the closed forms' prediction.

    Raises:
        AmpError: A requested technique is not possible, or the step cannot be counted, which it requires.
    """
    whole = make(budget)
    try:
        first = _Counted.of(whole, on_top_of, shape)
    except AmpError as error:
        if named:
            raise
        note = f"the peak is that of closed forms, for the step was not counted: {error}"
        return replace(whole, notes=(*whole.notes, note)), None
    found = [first.planned(budget, named=named, budget_named=budget_named)]
    if named is None and budget is not None:
        other = _other(first, make, on_top_of, shape, budget)
        found += [] if other is None else [other.planned(budget, named=named, budget_named=budget_named)]
    fitting = [one for one in found if budget is None or one[0].predicted_peak_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda one: _seconds_of_a_batch(one[0]))
    return min(found, key=lambda one: one[0].predicted_peak_bytes)


def split_by_decoder(
    strategies: Sequence[str] | None, *, policy: str
) -> tuple[list[str] | None, tuple[str, ...] | None]:
    """Split the requested strategies into those of the decoder, and those beyond it; None leaves them to the policy.

    "paper", AMP's fixed mapping, adds no strategy of the second kind.
    """
    if strategies is None:
        return None, () if policy == "paper" else None
    beyond = beyond_decoder(strategies)
    return [name for name in strategies if name not in beyond], beyond


def predict_decoder_again(given: Plan, on_top_of: OnTopOf, shape: ModelShape) -> tuple[Plan, ProfiledStep]:
    """Predict a given plan again, whose bytes are those of closed forms, by a count of the step."""
    counted = _Counted.of(given, on_top_of, shape)
    found = plan_again(given, counted.seen, count=counted.count)
    return counted.joined(found, extra_seconds=0.0), counted.seen


def _other(first: "_Counted", make: Make, on_top_of: OnTopOf, shape: ModelShape, budget: int) -> "_Counted | None":
    """Count what the closed forms choose when they are off by what the last count has shown.

    Closed forms are above some counts: once a plan fits, a faster one is counted too that they place just above the
    budget.

    Returns:
        The fastest plan of the decoder that was counted and fits, if any does; else the leanest; None if that is
        `first`.
    """
    make, tried, last, best = cache(make), {_choices(first.whole)}, first, first

    def is_useful(whole: Plan) -> bool:
        if _choices(whole) in tried:
            return False
        return best.peak_bytes > budget or TIE * _seconds_of_a_batch(whole) < _seconds_of_a_batch(best.whole)

    # of plans that may fit, none is tried that closed forms place above one that does not
    exceeded = inf if first.peak_bytes <= budget else first.whole.predicted_peak_bytes
    for left in reversed(range(TRIES + 1)):
        # what lies outside hardly changes with the plan, so the decoder's budget differs by what the count does
        expected = budget - (last.peak_bytes - last.whole.predicted_peak_bytes)
        if best.peak_bytes <= budget:
            limits = [expected, min(OVER * max(budget, expected), exceeded - 1)] if left else []
        else:
            # nothing fits yet: after the expected one, that which needs least
            limits = [expected, 1] if left else [1]
        whole = next(filter(is_useful, (make(max(1, int(limit))) for limit in limits)), None)
        if whole is None:
            break
        tried.add(_choices(whole))
        try:
            last = _Counted.of(whole, on_top_of, shape)
        except AmpError:
            break
        if last.peak_bytes > budget:
            exceeded = min(exceeded, whole.predicted_peak_bytes)
        if last.peak_bytes <= budget or last.peak_bytes < best.peak_bytes:
            best = last
    return None if best is first else best


def _choices(plan: Plan) -> tuple[object, ...]:
    return plan.strategies, plan.mesh


def _seconds_of_a_batch(plan: Plan) -> float:
    return ((plan.predicted_step_seconds or 0.0) + (plan.predicted_rest_seconds or 0.0)) / plan.mesh.data


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """A plan of the decoder by closed forms, and the step that is counted with its techniques.

    Attributes:
        computing: Seconds of the decoder without collectives, by closed forms; None if they are not known.
    """

    whole: Plan
    seen: ProfiledStep
    count: Count
    computing: float | None

    @classmethod
    def of(cls, whole: Plan, on_top_of: OnTopOf, shape: ModelShape) -> "_Counted":
        own = [rule for rule in whole.rules if is_of_decoder(rule) or rule.strategy not in PREDICTIONS]
        # a registered technique may send what only ranks that exist answer
        left = {rule.strategy: None for rule in own if _sends_unknown(rule)}
        rules = tuple(rule for rule in own if rule.strategy != "S1" and rule.strategy not in left)
        seen, count = on_top_of(rules, whole.mesh.model)
        if left:
            note = f"what {', '.join(left)} saves on ranks of the model axis is not counted"
            seen = replace(seen, notes=(*seen.notes, note))
        computing = None
        if whole.predicted_step_seconds is not None:
            computing = decoder_seconds(shape, whole.axes, whole.mesh, replace(seen.rates, links=AT_ONCE))
        return cls(whole=whole, seen=seen, count=count, computing=computing)

    @property
    def peak_bytes(self) -> int:
        """Peak of a rank without further techniques."""
        return as_it_is(self.seen, self.whole.gradient_ranks).peak_bytes

    def planned(
        self, budget: int | None, *, named: tuple[str, ...] | None, budget_named: bool
    ) -> tuple[Plan, ProfiledStep]:
        """Plan the rest of the step as of any module."""
        # without a budget any step fits, and no technique is searched for that saves memory
        base = replace(self.whole, budget_bytes=sys.maxsize if budget is None else budget)
        found = plan_module(base, self.seen, named=named, budget_named=budget_named, count=self.count)
        found = replace(found, budget_bytes=budget)
        plain = as_it_is(self.seen, self.whole.gradient_ranks).seconds
        extra = (found.predicted_step_seconds or plain) - plain
        return self.joined(found, extra_seconds=extra), self.seen

    def joined(self, found: Plan, *, extra_seconds: float) -> Plan:
        """Return the plan of the whole step with the decoder's shares."""
        whole, beyond = self.whole, self.peak_bytes - self.whole.predicted_peak_bytes
        rest = whole.predicted_rest_seconds
        if rest is None and self.computing is not None:
            rest = max(0.0, as_it_is(self.seen, whole.gradient_ranks).seconds - self.computing)
        # what a plan lacks is said of ranks of the data axis
        split = whole.mesh.model > 1
        return replace(
            found,
            notes=tuple(note for note in found.notes if not (split and note.startswith(LEAST))),
            predicted_base_bytes=max(0, whole.predicted_base_bytes + beyond),
            predicted_stratum_bytes=whole.predicted_stratum_bytes,
            predicted_step_seconds=whole.predicted_step_seconds,
            predicted_rest_seconds=None if rest is None else rest + extra_seconds,
            candidates=tuple(_candidate(one, found, beyond) for one in whole.candidates),
        )


def _sends_unknown(rule: Rule) -> bool:
    row = STRATEGIES[rule.strategy]
    return row.registered and row.model_axis


def _candidate(one: Candidate, found: Plan, beyond: int) -> Candidate:
    """Return a candidate of the decoder with the bytes of the whole step."""
    if one.verdict == "chosen":
        return replace(one, strategies=in_order(found.strategies), peak_bytes=found.predicted_peak_bytes)
    one, budget = replace(one, peak_bytes=max(0, one.peak_bytes + beyond)), found.budget_bytes
    exceeds = budget is not None and one.peak_bytes > budget
    return replace(one, verdict=f"exceeds {format_bytes(budget or 0)}") if exceeds else one


def with_rules_beyond(plan: Plan, before: Plan) -> Plan:
    """Return a new plan of the decoder with the techniques that `before` has beyond the decoder."""
    kept = [rule for rule in before.rules if rule.strategy != "S1" and not is_of_decoder(rule)]
    kept = [rule for rule in kept if rule.fqn not in {own.fqn for own in plan.rules if own.strategy != "S1"}]
    if not kept:
        return plan
    whole = rules_in_order((*plan.rules, *kept))
    strategies = in_order({*plan.strategies, *(rule.strategy for rule in kept)})
    return replace(plan, strategies=strategies, axes=Axes.of(strategies, (rule.spec for rule in whole)), rules=whole)
