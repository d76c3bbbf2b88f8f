"""Plan recomputation and chunks for blocks outside a Hi-C decoder, in addition to the decoder's techniques.

The decoder's prediction knows little of the activations of encoders and a graph. So a step of one device is counted
with the plan's techniques for one device and with those of the blocks, and the difference to the prediction is added:

    peak = prediction of the plan + (count - prediction on one device)

This is exact to the count if the model axis has one rank. With several ranks it is exact if the peak of the step is in
the decoder.

`with_blocks_outside` applies techniques that were requested by name. `within_budget` counts the step with the policy's
plan if the user gave a budget. If the step exceeds it:

    1. take the fastest plan of the decoder with which the step fits, down to the plan that needs least
    2. with that last plan, recompute blocks outside: the choice with the least extra time that fits, made for the chain
       of the step with the decoder's techniques (costs/choose_forms.py)

A chain and a count differ in the bytes that the decoder's own functions save, by an amount that does not depend on the
blocks outside. The choice takes this difference into account, and is counted.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import lightning.pytorch as pl

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.chain.chain import peak_bytes
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.footprint.recompute_state import unrepeatable
from lightning_amp.installing.install import overlap
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.candidates import as_it_is, draft
from lightning_amp.planning.modules.finish_plan import rules_of
from lightning_amp.planning.plan.plan import Axes, Candidate, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.table import OF_BLOCKS, PREDICTIONS, in_order, is_of_block

QUICK = tuple(name for name in OF_BLOCKS if not PREDICTIONS[name].slow)
"""Techniques of blocks without a long search: a budget may add these if no plan of the decoder fits."""
TRIES = 3
"""Number of attempts to make a choice leaner whose count exceeds the budget."""


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A plan of the decoder, and the step for which it was made."""

    whole: Plan  # for all ranks
    alone: Plan  # the techniques of it that one device has
    step: StepOfModule
    decoder: str  # its name
    rates: Rates

    @property
    def local(self) -> tuple[Rule, ...]:
        """The rules of the plan for one device."""
        return tuple(rule for rule in self.alone.rules if rule.strategy != "S1")

    def counted(self, rules: Sequence[Rule] = (), *, seconds: float = 0.0) -> Plan:
        """Return the plan with the peak of a counted step, and with rules of blocks outside that add `seconds`.

        Raises AmpError: the step cannot be counted.
        """
        more = self.step.count([*self.local, *rules]).peak_bytes - self.alone.predicted_peak_bytes
        plan = with_rules(self.whole, rules, seconds=seconds) if rules else self.whole
        return replace(
            plan,
            predicted_base_bytes=max(0, plan.predicted_base_bytes + more),
            predicted_peak_bytes=plan.predicted_peak_bytes + more,
            notes=(*plan.notes, "what lies outside of the decoder was counted in a step of one device"),
        )


def with_blocks_outside(made: DecoderPlan, named: Collection[str], *, share_statistics: bool) -> Plan:
    """Add the requested techniques to all blocks outside the decoder that save memory with them.

    `named`: the requested techniques; `share_statistics`: whether ranks of a data axis share batch statistics. Raises
    AmpError if the step cannot be counted, and PlanError if there are no such blocks.
    """
    step, shares = made.step, share_statistics and made.whole.mesh.data > 1
    try:
        seen = step.profiled(made.rates, shared_statistics=shares)
        found = draft(seen, [name for name in PREDICTIONS if name in named], ranks=1, budget=None)
        if isinstance(found, str):
            raise PlanError(
                f"{' and '.join(sorted(named))} cannot be used as requested with {', '.join(made.whole.strategies)},"
                f" which decide what is kept of the strata of {made.decoder!r}: outside of it {found}; name only"
                " techniques that help there"
            )
        return made.counted(rules_of(found, named=True), seconds=found.seconds - as_it_is(seen, 1).seconds)
    finally:
        step.forget()


def step_beside_decoder(trainer: pl.Trainer) -> StepOfModule | None:
    """Return the step of a fit if its module has blocks outside its decoder that can be recomputed; else None.

    It is counted on fake tensors only: real values could need more memory than there is. All ranks must call it.
    """
    decoders = find_decoders(trainer.lightning_module)
    blocks = {
        fqn: block
        for fqn, block in find_blocks(trainer.lightning_module).items()
        if not any(overlap(fqn, decoder) for decoder in decoders)
    }
    if not decoders or all(unrepeatable(block) for block in blocks.values()):
        return None
    return StepOfModule.of(trainer, decoder=True, values=False)


def within_budget(make: Callable[[int], DecoderPlan], budget: int) -> Plan:
    """Return the policy's plan if the step fits; else a plan that needs less, and may recompute blocks outside.

    `make`: function that returns the policy's plan of the decoder for a number of bytes, or the plan that needs least.
    """
    made = chosen = make(budget)
    step = made.step
    try:
        step.take(made.rates)
        found = made.counted()
        if found.predicted_peak_bytes <= budget:
            return made.whole
        for _ in range(TRIES):
            # the bytes outside hardly change with the plan: reduce the decoder's budget by the measured difference
            made = make(max(1, budget - (found.predicted_peak_bytes - made.whole.predicted_peak_bytes)))
            found = made.counted()
            if found.predicted_peak_bytes <= budget:
                return _of_budget(found, made, found, budget)
        # no plan fits 1 byte, so this is the plan that needs least
        made = make(1)
        found = made.counted()
        return _with_blocks(_of_budget(found, made, found, budget), made, budget)
    except AmpError as error:
        note = f"what lies outside of the decoder was not counted: {error}"
        return replace(chosen.whole, notes=(*chosen.whole.notes, note))
    finally:
        step.forget()


def _with_blocks(before: Plan, made: DecoderPlan, budget: int) -> Plan:
    """Return the plan with techniques on as many blocks outside as the budget requires, or on all if none fits."""
    best, over = before, before.predicted_peak_bytes - budget
    if over <= 0:
        return before
    step = made.step.step_with(made.local)
    seen = ProfiledStep(profile=step.profile, chain=step.chain, rates=made.rates)
    # chain and count differ by a constant, so the excess of the count is subtracted from the chain's limit
    limit = peak_bytes(seen.chain, ()) - over
    for _ in range(TRIES):
        found = draft(seen, QUICK, ranks=1, budget=max(0, limit))
        if isinstance(found, str) or found.peak_bytes >= as_it_is(seen, 1).peak_bytes:
            break
        why = f"no plan of the decoder alone is within {format_bytes(budget)}: "
        rules = [replace(rule, why=why + rule.why) for rule in found.targets]
        plan = made.counted(rules, seconds=found.seconds - as_it_is(seen, 1).seconds)
        if plan.predicted_peak_bytes < best.predicted_peak_bytes:
            best = _of_budget(plan, made, before, budget)
        over = best.predicted_peak_bytes - budget
        if over <= 0 or len(rules) == len(seen.chain.names):
            break
        limit -= over
    return best


def _of_budget(plan: Plan, made: DecoderPlan, plain: Plan, budget: int) -> Plan:
    """Update budget and candidates of a plan for the user's budget; `plain` has no techniques on blocks outside."""
    more, candidates = plain.predicted_peak_bytes - made.whole.predicted_peak_bytes, list[Candidate]()
    for one in plan.candidates:
        peak = max(0, one.peak_bytes + more)
        if one.verdict == "chosen":
            one = replace(one, strategies=plan.strategies, peak_bytes=plan.predicted_peak_bytes)
        else:
            exceeds = f"exceeds {format_bytes(budget)}"
            one = replace(one, peak_bytes=peak, verdict=exceeds if peak > budget else one.verdict)
        candidates.append(one)
    return replace(plan, budget_bytes=budget, candidates=tuple(candidates))


def with_rules(plan: Plan, rules: Iterable[Rule], *, seconds: float = 0.0) -> Plan:
    """Return a decoder's plan with rules of blocks outside, which add `seconds` to a step."""
    rules = tuple(rules)
    strategies = in_order({*plan.strategies, *(rule.strategy for rule in rules)})
    whole, rest = (*plan.rules, *rules), plan.predicted_rest_seconds
    return replace(
        plan,
        strategies=strategies,
        axes=Axes.of(strategies, (rule.spec for rule in whole)),
        rules=whole,
        predicted_rest_seconds=None if rest is None else rest + seconds,
    )


def keeping_blocks(plan: Plan, before: Plan) -> Plan:
    """Return a new plan of the decoder with the techniques that `before` has on blocks outside."""
    kept = [rule for rule in before.rules if is_of_block(rule)]
    kept = [rule for rule in kept if rule.fqn not in {own.fqn for own in plan.rules}]
    return with_rules(plan, kept) if kept else plan
