"""Plan a module with a Hi-C decoder: the decoder's techniques by closed forms, and its whole step by counts.

    1. make the policy's plan of the decoder for the budget (policies/make_plan.py)
    2. count the step with the techniques of that plan, and plan the rest as of any module (plan_module.py)
    3. if more than the decoder's techniques is needed, do the same with a leaner plan of the decoder: the faster of
       both is taken, or if neither fits, the one that requires less

Steps are counted on one device. Of techniques that split the decoder over a model axis, the closed forms say how much
less a rank holds:

    peak = count on one device - (closed form on one device - closed form on these ranks)

This is exact if the axis has one rank, or if the peak of the step is in the decoder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.modules.candidates import as_it_is
from lightning_amp.planning.modules.min_memory_plan import LEAST
from lightning_amp.planning.modules.plan_module import Count, plan_again, plan_module
from lightning_amp.planning.plan.plan import Axes, Candidate, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import (
    PREDICTIONS,
    STRATEGIES,
    beyond_decoder,
    in_order,
    is_of_decoder,
    rules_in_order,
)

TRIES = 3
"""Number of leaner plans of the decoder that are counted until one fits."""
Make = Callable[[int | None], Plan]
"""Maps a budget in bytes to the plan of the decoder alone, by closed forms; no plan fits 1 byte, so it needs least."""
OnTopOf = Callable[[tuple[Rule, ...], bool], tuple[ProfiledStep, Count]]
"""(rules of the decoder, whether a run frees the last step's gradients) -> the step that is counted so, and what counts
it with further rules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderPlan:
    """The plan of a module with a decoder, and the step with the techniques of its decoder.

    Attributes:
        seen: The step; None if it could not be counted, and the plan has the closed forms' prediction.
    """

    plan: Plan
    seen: ProfiledStep | None


def plan_decoder(
    make: Make,
    on_top_of: OnTopOf,
    shape: ModelShape,
    *,
    budget: int | None,
    named: tuple[str, ...] | None = None,
    budget_named: bool = True,
) -> DecoderPlan:
    """Plan a module with a decoder.

    Args:
        shape: Sizes of the module.
        named: Techniques beyond the decoder that the user requested; None leaves all techniques to the policy.
        budget_named: Whether the user set the budget; if not, requested techniques are applied as much as possible.

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
        return DecoderPlan(plan=replace(whole, notes=(*whole.notes, note)), seen=None)
    found = [first.planned(budget, named=named, budget_named=budget_named)]
    if named is None and budget is not None and first.peak_bytes > budget:
        leaner = _leaner(first, make, on_top_of, shape, budget)
        found += [leaner.planned(budget, named=named, budget_named=budget_named)] if leaner is not None else []
    fitting = [one for one in found if budget is None or one.plan.predicted_peak_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda one: _seconds_of_a_batch(one.plan))
    return min(found, key=lambda one: one.plan.predicted_peak_bytes)


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


def predict_decoder_again(given: Plan, on_top_of: OnTopOf, shape: ModelShape) -> DecoderPlan:
    """Predict a given plan again, whose bytes are those of closed forms, by a count of the step."""
    counted = _Counted.of(given, on_top_of, shape)
    budget = None if given.budget_bytes is None else given.budget_bytes + counted.less_bytes
    found = plan_again(replace(given, budget_bytes=budget), counted.seen, count=counted.count)
    return DecoderPlan(plan=counted.joined(found, given.budget_bytes, extra_seconds=0.0), seen=counted.seen)


def _leaner(first: "_Counted", make: Make, on_top_of: OnTopOf, shape: ModelShape, budget: int) -> "_Counted | None":
    """Return the first leaner plan of the decoder whose count fits, or the leanest; None if `first` is the leanest."""
    found, tried = first, {_choices(first.whole)}
    for limit in (*[None] * TRIES, 1):
        # what lies outside hardly changes with the plan, so the decoder's budget is smaller by what the count exceeds
        whole = make(limit or max(1, budget - (found.peak_bytes - found.whole.predicted_peak_bytes)))
        if _choices(whole) in tried:
            continue
        tried.add(_choices(whole))
        try:
            found = _Counted.of(whole, on_top_of, shape)
        except AmpError:
            break
        if found.peak_bytes <= budget:
            break
    return None if found is first else found


def _choices(plan: Plan) -> tuple[object, ...]:
    return plan.strategies, plan.mesh


def _seconds_of_a_batch(plan: Plan) -> float:
    return ((plan.predicted_step_seconds or 0.0) + (plan.predicted_rest_seconds or 0.0)) / plan.mesh.data


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """A plan of the decoder by closed forms, and the step that is counted with its techniques.

    Attributes:
        less_bytes: Bytes that a rank of the model axis holds less than one device, by closed forms.
    """

    whole: Plan
    seen: ProfiledStep
    count: Count
    less_bytes: int

    @classmethod
    def of(cls, whole: Plan, on_top_of: OnTopOf, shape: ModelShape) -> "_Counted":
        own = [rule for rule in whole.rules if is_of_decoder(rule) or rule.strategy not in PREDICTIONS]
        rules = [rule for rule in own if rule.strategy != "S1" and not STRATEGIES[rule.strategy].model_axis]
        less = 0
        if whole.mesh.model > 1:
            local = [name for name in whole.strategies if not STRATEGIES[name].model_axis]
            less = predict(shape, local).peak_bytes - whole.predicted_peak_bytes
        # the closed forms, which say what ranks of a model axis hold less, are with these gradients
        seen, count = on_top_of(tuple(rules), whole.mesh.model == 1)
        return cls(whole=whole, seen=seen, count=count, less_bytes=less)

    @property
    def peak_bytes(self) -> int:
        """Peak of a rank without further techniques."""
        return as_it_is(self.seen, self.whole.gradient_ranks).peak_bytes - self.less_bytes

    def planned(self, budget: int | None, *, named: tuple[str, ...] | None, budget_named: bool) -> DecoderPlan:
        """Plan the rest of the step as of any module."""
        base = replace(self.whole, budget_bytes=None if budget is None else budget + self.less_bytes)
        found = plan_module(base, self.seen, named=named, budget_named=budget_named, count=self.count)
        plain = as_it_is(self.seen, self.whole.gradient_ranks).seconds
        extra = (found.predicted_step_seconds or plain) - plain
        return DecoderPlan(plan=self.joined(found, budget, extra_seconds=extra), seen=self.seen)

    def joined(self, found: Plan, budget: int | None, *, extra_seconds: float) -> Plan:
        """Return the plan of one device with the bytes of these ranks, and with the decoder's shares."""
        whole, peak = self.whole, found.predicted_peak_bytes - self.less_bytes
        beyond = self.peak_bytes - whole.predicted_peak_bytes
        decoder, rest = whole.predicted_step_seconds, whole.predicted_rest_seconds
        if rest is None and decoder is not None:
            rest = max(0.0, as_it_is(self.seen, whole.gradient_ranks).seconds - decoder)
        # the bytes that a plan lacks are said of one device
        notes = [note for note in found.notes if not (self.less_bytes and note.startswith(LEAST))]
        return replace(
            found,
            budget_bytes=budget,
            predicted_base_bytes=max(0, whole.predicted_base_bytes + beyond),
            predicted_stratum_bytes=whole.predicted_stratum_bytes,
            predicted_peak_bytes=peak,
            predicted_step_seconds=decoder,
            predicted_rest_seconds=None if rest is None else rest + extra_seconds,
            candidates=tuple(_candidate(one, found, peak, budget, beyond) for one in whole.candidates),
            notes=tuple(notes),
        )


def _candidate(one: Candidate, found: Plan, peak: int, budget: int | None, beyond: int) -> Candidate:
    """Return a candidate of the decoder with the bytes of the whole step."""
    if one.verdict == "chosen":
        return replace(one, strategies=in_order(found.strategies), peak_bytes=peak)
    one = replace(one, peak_bytes=max(0, one.peak_bytes + beyond))
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
