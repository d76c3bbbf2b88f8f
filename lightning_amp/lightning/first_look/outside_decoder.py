"""Blocks outside of a Hi-C decoder that run again, beside techniques of the decoder that say what is kept of strata.

The decoder's own prediction knows little of what encoders and a graph keep. So a step of one device is counted with the
plan's techniques for one device and with the blocks, and what it takes beyond the decoder's prediction is added:

    peak = predicted, of the plan + (counted - predicted), both on one device

Exact to the count where the model axis has one rank. With several, as far as the step has most where the decoder works.
"""

from dataclasses import replace

from lightning_amp.errors import PlanError
from lightning_amp.lightning.first_look.step_of_module import StepOfModule
from lightning_amp.parallel.install import overlap
from lightning_amp.planning.modules.chain import extra_seconds
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.plan import Plan, Rule
from lightning_amp.planning.plan.specs import RecomputeBlock
from lightning_amp.planning.plan.strategies import in_order
from lightning_amp.planning.policies.build_rules import BY_USER
from lightning_amp.planning.time.device_rates import Rates
from lightning_amp.quantities import format_bytes


def with_blocks_outside(made: Plan, alone: Plan, step: StepOfModule, decoder: str, rates: Rates) -> Plan:
    """A plan with rules for all blocks outside of the decoder that keep less when they run again.

    Args:
        made: Without them.
        alone: What of it is for one device.
        step: Of the module.
        decoder: Its name.
        rates: Of the device.

    Raises:
        AmpError: The step cannot be counted.
        PlanError: There are no such blocks.
    """
    chain = step.seen(rates).chain
    saved: dict[str, int] = {}
    for block in chain.blocks:
        if not overlap(block.fqn, decoder) and block.fqn in chain.names and block.saved_bytes > 0:
            saved[block.fqn] = saved.get(block.fqn, 0) + block.saved_bytes
    if not saved:
        raise PlanError(
            f"recompute was asked for beside {', '.join(made.strategies)}, which say what is kept of the strata of"
            f" {decoder!r}, and outside of it no block keeps less when it runs again; leave recompute out"
        )
    again = tuple(
        Rule(
            fqn=name,
            spec=RecomputeBlock(),
            strategy="recompute",
            why=f"{BY_USER} (outside of the decoder; it keeps {format_bytes(n_bytes)} less)",
            saves_bytes=n_bytes,
        )
        for name, n_bytes in saved.items()
    )
    local = [rule for rule in alone.rules if rule.strategy != "S1"]
    more = step.count([*local, *again]).peak_bytes - alone.predicted_peak_bytes
    strategies, rules = in_order({*made.strategies, "recompute"}), (*made.rules, *again)
    rest = made.predicted_rest_seconds
    return replace(
        made,
        strategies=strategies,
        axes=Axes.of(strategies, (rule.spec for rule in rules)),
        rules=rules,
        predicted_base_bytes=max(0, made.predicted_base_bytes + more),
        predicted_peak_bytes=made.predicted_peak_bytes + more,
        predicted_rest_seconds=None if rest is None else rest + extra_seconds(chain, tuple(saved)),
        notes=(*made.notes, "what lies outside of the decoder was counted in a step of one device"),
    )
