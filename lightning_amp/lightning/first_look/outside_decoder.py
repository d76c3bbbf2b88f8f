"""Blocks outside of a Hi-C decoder that run again, beside techniques of the decoder that say what is kept of strata.

The decoder's own prediction knows little of what encoders and a graph keep. So a step of one device is counted with the
plan's techniques for one device and with the blocks, and what it takes beyond the decoder's prediction is added:

    peak = predicted, of the plan + (counted - predicted), both on one device

Exact to the count where the model axis has one rank. With several, as far as the step has most where the decoder works.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.lightning.first_look.step_of_module import StepOfModule
from lightning_amp.parallel.install import overlap
from lightning_amp.planning.modules.chain import extra_seconds
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.plan import Plan, Rule
from lightning_amp.planning.plan.specs import ChunkBlock, RecomputeBlock
from lightning_amp.planning.plan.strategies import in_order
from lightning_amp.planning.policies.build_rules import BY_USER
from lightning_amp.planning.time.device_rates import Rates
from lightning_amp.quantities import format_bytes


@dataclass(frozen=True, slots=True)
class Made:
    """A plan of the decoder.

    Attributes:
        whole: For all ranks.
        alone: What of it is for one device.
    """

    whole: Plan
    alone: Plan

    @property
    def local(self) -> tuple[Rule, ...]:
        """The rules that one device has."""
        return tuple(rule for rule in self.alone.rules if rule.strategy != "S1")

    def beyond(self, step: StepOfModule, rules: Sequence[Rule] = ()) -> int:
        """Bytes that a step of one device, with blocks that have rules, takes beyond what is predicted of it.

        Raises:
            AmpError: The step cannot be counted.
        """
        return step.count([*self.local, *rules]).peak_bytes - self.alone.predicted_peak_bytes


def with_blocks_outside(made: Made, step: StepOfModule, decoder: str, rates: Rates) -> Plan:
    """A plan with rules for all blocks outside of the decoder that keep less when they run again.

    Args:
        made: Without them.
        step: Of the module.
        decoder: Its name.
        rates: Of the device.

    Raises:
        AmpError: The step cannot be counted.
        PlanError: There are no such blocks.
    """
    chain = outside(step.seen(rates).chain, decoder)
    saved = saved_bytes(chain)
    if not saved:
        raise PlanError(
            f"recompute was asked for beside {', '.join(made.whole.strategies)}, which say what is kept of the strata"
            f" of {decoder!r}, and outside of it no block keeps less when it runs again; leave recompute out"
        )
    again = recomputed(saved, f"{BY_USER} (outside of the decoder; it keeps {{}} less)")
    found = with_rules(made.whole, again, seconds=extra_seconds(chain, tuple(saved)))
    try:
        return taking(found, made.beyond(step, again))
    finally:
        step.forget()


def outside(chain: Chain, decoder: str) -> Chain:
    """A chain in which the decoder's parts, which have their own techniques, stay as they are."""
    inside = "it is of the decoder"
    blocks = (replace(b, fixed=inside) if overlap(b.fqn, decoder) else b for b in chain.blocks)
    return replace(chain, blocks=tuple(blocks))


def saved_bytes(chain: Chain) -> dict[str, int]:
    """Blocks that keep less when they run again, and how much."""
    saved: dict[str, int] = {}
    for block in chain.blocks:
        if block.fqn in chain.names and block.saved_bytes > 0:
            saved[block.fqn] = saved.get(block.fqn, 0) + block.saved_bytes
    return saved


def recomputed(saved: dict[str, int], why: str) -> tuple[Rule, ...]:
    """A rule for each; the bytes that it saves are put into the reason."""
    return tuple(
        Rule(
            fqn=name,
            spec=RecomputeBlock(),
            strategy="recompute",
            why=why.format(format_bytes(n_bytes)),
            saves_bytes=n_bytes,
        )
        for name, n_bytes in saved.items()
    )


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


def taking(plan: Plan, more: int) -> Plan:
    """The plan, predicted to take so many bytes beyond what its decoder does."""
    return replace(
        plan,
        predicted_base_bytes=max(0, plan.predicted_base_bytes + more),
        predicted_peak_bytes=plan.predicted_peak_bytes + more,
        notes=(*plan.notes, "what lies outside of the decoder was counted in a step of one device"),
    )


def keeping_blocks(plan: Plan, before: Plan) -> Plan:
    """A plan of the decoder that takes the place of another one, whose blocks outside stay as they are."""
    kept = [rule for rule in before.rules if isinstance(rule.spec, RecomputeBlock | ChunkBlock)]
    kept = [rule for rule in kept if rule.fqn not in {own.fqn for own in plan.rules}]
    return with_rules(plan, kept) if kept else plan
