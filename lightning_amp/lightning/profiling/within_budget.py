"""Plan a module with a Hi-C decoder within a budget: techniques inside the decoder, recomputation outside.

A policy chooses a plan of the decoder by its prediction, which knows little of what lies outside. With a budget that a
person has named the step is counted with that plan, and where it takes more:

    1. plans of the decoder that need less, down to the one that needs least: the fastest with which the step fits
    2. besides that last one as many blocks outside run again as the budget asks for: the least extra time that fits,
       chosen for the chain of the step with the decoder's techniques in it (techniques/recompute/choose.py)

A chain counts what the decoder's own functions keep a little differently than the step does, by the same bytes whatever
blocks outside do; the choice is made with that difference, and counted.
"""

from collections.abc import Callable
from dataclasses import replace

import lightning.pytorch as pl

from lightning_amp.costs.chain import extra_seconds, peak_bytes
from lightning_amp.costs.device_rates import Rates
from lightning_amp.errors import AmpError
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.footprint.recompute_state import unrepeatable
from lightning_amp.installing.install import overlap
from lightning_amp.lightning.profiling.outside_decoder import (
    Made,
    outside,
    recomputed,
    saved_bytes,
    taking,
    with_rules,
)
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.plan.plan import Candidate, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.recompute.choose import choose, leanest

TRIES = 3
"""Times that a choice which was counted above the budget is made leaner."""


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


def within_budget(
    make: Callable[[int], Made], step: StepOfModule, decoder: str, rates: Rates, budget: int
) -> Plan:
    """The policy's plan, if the step fits with it; else one that needs less, with blocks outside that run again.

    Args:
        make: Bytes -> the policy's plan of the decoder within these, or the one that needs least.
        step: Of the module.
        decoder: Its name.
        rates: Of the device.
        budget: Bytes of a device.
    """
    made = make(budget)
    try:
        step.take()
        return _fitted(made, make, step, decoder, rates, budget)
    except AmpError as error:
        note = f"what lies outside of the decoder was not counted: {error}"
        return replace(made.whole, notes=(*made.whole.notes, note))
    finally:
        step.forget()


def _fitted(
    made: Made, make: Callable[[int], Made], step: StepOfModule, decoder: str, rates: Rates, budget: int
) -> Plan:
    more = made.beyond(step)
    if made.whole.predicted_peak_bytes + more <= budget:
        return made.whole
    for _ in range(TRIES):
        made = make(max(1, budget - more))
        more = made.beyond(step)
        if made.whole.predicted_peak_bytes + more <= budget:
            return _of_budget(taking(made.whole, more), more, budget)
    made = make(1)
    more = made.beyond(step)
    before = _of_budget(taking(made.whole, more), more, budget)
    if before.predicted_peak_bytes <= budget:
        return before
    return _recomputing(before, made, more, step, decoder, rates)


def _recomputing(before: Plan, made: Made, more: int, step: StepOfModule, decoder: str, rates: Rates) -> Plan:
    """With as many blocks outside computed again as the budget asks for, or all where they are not enough."""
    assert before.budget_bytes is not None, "there is one"
    chain = outside(step.chain_with(made.local, rates), decoder)
    # of what is counted on one device
    limit = before.budget_bytes - made.whole.predicted_peak_bytes + made.alone.predicted_peak_bytes
    limit += peak_bytes(chain, ()) - (made.alone.predicted_peak_bytes + more)
    best, n_blocks = before, len(saved_bytes(chain))
    for _ in range(TRIES):
        bound = max(0, limit)
        names = (choose(chain, bound) or leanest(chain, at_least=bound)).recomputed
        saved = {name: n for name, n in saved_bytes(chain).items() if name in names}
        if not saved:
            break
        again = recomputed(
            saved,
            f"no plan of the decoder alone is within {format_bytes(before.budget_bytes)}: {len(saved)} of {n_blocks}"
            " blocks outside of it are computed again, this one keeps {} less",
        )
        beyond = made.beyond(step, again)
        found = taking(
            with_rules(made.whole, again, seconds=extra_seconds(chain, tuple(saved))),
            beyond,
        )
        found = _of_budget(found, more, before.budget_bytes)
        if found.predicted_peak_bytes < best.predicted_peak_bytes:
            best = found
        over = best.predicted_peak_bytes - before.budget_bytes
        if over <= 0 or len(saved) == n_blocks:
            break
        limit -= over
    return best


def _of_budget(plan: Plan, more: int, budget: int) -> Plan:
    """A plan and what it was compared with, of the budget that a person has named."""
    candidates = tuple(_counted(candidate, plan, more, budget) for candidate in plan.candidates)
    return replace(plan, budget_bytes=budget, candidates=candidates)


def _counted(candidate: Candidate, plan: Plan, more: int, budget: int) -> Candidate:
    if candidate.verdict == "chosen":
        return replace(candidate, strategies=plan.strategies, peak_bytes=plan.predicted_peak_bytes)
    peak = max(0, candidate.peak_bytes + more)
    exceeds = f"exceeds {format_bytes(budget)}"
    return replace(candidate, peak_bytes=peak, verdict=exceeds if peak > budget else candidate.verdict)
