"""Plan blocks outside a Hi-C decoder together with the decoder's techniques.

The decoder's own prediction knows little of what encoders and a graph keep. So a step of one device is counted with the
plan's techniques for one device and with the blocks, and what it takes beyond the decoder's prediction is added:

    peak = predicted, of the plan + (counted - predicted), both on one device

Exact to the count where the model axis has one rank. With several, as far as the step has most where the decoder works.

`with_blocks_outside` carries out what was requested by name. `within_budget` counts the step with the policy's plan
where a person has named a budget, and where it takes more:

    1. plans of the decoder that need less, down to the one that needs least: the fastest with which the step fits
    2. with that last one as many blocks outside run again as the budget asks for: the least extra time that fits,
       chosen for the chain of the step with the decoder's techniques in it (costs/choose_forms.py)

A chain counts what the decoder's own functions keep a little differently than the step does, by the same bytes whatever
blocks outside do; the choice is made with that difference, and counted.
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
"""Techniques of blocks that need no long search: a budget gets them where no plan of the decoder is within it."""
TRIES = 3
"""Times that a choice which was counted above the budget is made leaner."""


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A plan of the decoder, and the step that it is for."""

    whole: Plan  # for all ranks
    alone: Plan  # what of it is for one device
    step: StepOfModule
    decoder: str  # its name
    rates: Rates

    @property
    def local(self) -> tuple[Rule, ...]:
        """The rules that one device has."""
        return tuple(rule for rule in self.alone.rules if rule.strategy != "S1")

    def counted(self, rules: Sequence[Rule] = (), *, seconds: float = 0.0) -> Plan:
        """The plan with rules of blocks outside, which take so much longer, and the peak of a counted step. Raises
        AmpError: the step cannot be counted.
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
    """A plan with rules of techniques of blocks for all blocks outside of the decoder that take less with them.

    `named`: the techniques that were requested; `share_statistics`: whether ranks of a data axis exchange the
    statistics of batches. Raises AmpError where the step cannot be counted, and PlanError where there are no such
    blocks.
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
    """The step of a fit whose module has blocks outside of its decoder that could run again; None of anything else.

    It is counted without values or not at all: with them it takes the memory that there may not be. All ranks call it.
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
    """The policy's plan, if the step fits with it; else one that needs less, with blocks outside that run again.

    `make`: bytes -> the policy's plan of the decoder within these, or the one that needs least.
    """
    made = chosen = make(budget)
    step = made.step
    try:
        step.take(made.rates)
        found = made.counted()
        if found.predicted_peak_bytes <= budget:
            return made.whole
        for _ in range(TRIES):
            # what lies outside takes about as much with the next plan, which has so much less for the decoder
            made = make(max(1, budget - (found.predicted_peak_bytes - made.whole.predicted_peak_bytes)))
            found = made.counted()
            if found.predicted_peak_bytes <= budget:
                return _of_budget(found, made, found, budget)
        # no plan is within a byte, so that this is the one that needs least
        made = make(1)
        found = made.counted()
        return _with_blocks(_of_budget(found, made, found, budget), made, budget)
    except AmpError as error:
        note = f"what lies outside of the decoder was not counted: {error}"
        return replace(chosen.whole, notes=(*chosen.whole.notes, note))
    finally:
        step.forget()


def _with_blocks(before: Plan, made: DecoderPlan, budget: int) -> Plan:
    """With as much done to blocks outside as the budget asks for, or all where that is not enough."""
    best, over = before, before.predicted_peak_bytes - budget
    if over <= 0:
        return before
    step = made.step.step_with(made.local)
    seen = ProfiledStep(profile=step.profile, chain=step.chain, rates=made.rates)
    # the chain and the count differ by the same bytes whatever blocks outside do, so bytes are taken off the chain's
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
    """A plan and what it was compared with, of the budget that a person has named; `plain` leaves blocks outside."""
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
    """A decoder's plan with rules of blocks outside, which take so much longer."""
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
    """A plan of the decoder that takes the place of another one, whose blocks outside stay as they are."""
    kept = [rule for rule in before.rules if is_of_block(rule)]
    kept = [rule for rule in kept if rule.fqn not in {own.fqn for own in plan.rules}]
    return with_rules(plan, kept) if kept else plan
