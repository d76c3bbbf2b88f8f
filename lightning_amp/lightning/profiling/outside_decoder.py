"""Plan recomputed or chunked blocks outside a Hi-C decoder, together with the decoder's techniques.

The decoder's own prediction knows little of what encoders and a graph keep. So a step of one device is counted with the
plan's techniques for one device and with the blocks, and what it takes beyond the decoder's prediction is added:

    peak = predicted, of the plan + (counted - predicted), both on one device

Exact to the count where the model axis has one rank. With several, as far as the step has most where the decoder works.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_amp.costs.chain import CHUNKED, extra_seconds
from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.graph.table import Table
from lightning_amp.installing.install import overlap
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import BY_USER
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.predict import forms_of, in_chunks
from lightning_amp.techniques.chunk.spec import ChunkBlock
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.table import in_order

INSIDE = "it is of the decoder"


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


def with_blocks_outside(
    made: Made,
    step: StepOfModule,
    decoder: str,
    rates: Rates,
    named: Collection[str] = ("recompute",),
    *,
    share_statistics: bool = True,
) -> Plan:
    """A plan with rules for all blocks outside of the decoder that take less when they run again, or in chunks.

    Args:
        made: Without them.
        step: Of the module.
        decoder: Its name.
        rates: Of the device.
        named: Of recompute and chunk, what was requested.
        share_statistics: Whether ranks of a data axis exchange the statistics of batches.

    Raises:
        AmpError: The step cannot be counted.
        PlanError: There are no such blocks.
    """
    try:
        seen = step.profiled(rates, shared_statistics=share_statistics and made.whole.mesh.data > 1)
        chain = outside(seen.chain, decoder)
        if "chunk" in named:
            found = _in_chunks(made, seen, chain, decoder, again="recompute" in named)
        else:
            found = _again(made, chain, decoder)
        return taking(found, made.beyond(step, found.rules[len(made.whole.rules) :]))
    finally:
        step.forget()


def _again(made: Made, chain: Chain, decoder: str) -> Plan:
    saved = saved_bytes(chain)
    if not saved:
        raise PlanError(
            f"recompute cannot be used with {', '.join(made.whole.strategies)}, which decide what is kept of"
            f" the strata of {decoder!r}, and outside of it no block keeps less when it runs again; leave"
            " recompute out"
        )
    rules = recomputed(saved, f"{BY_USER} (outside of the decoder; it keeps {{}} less)")
    return with_rules(made.whole, rules, seconds=extra_seconds(chain, tuple(saved)))


def _in_chunks(made: Made, seen: ProfiledStep, chain: Chain, decoder: str, *, again: bool) -> Plan:
    """With every block in the form of the least bytes, unless that is far slower."""
    forms = forms_of(seen)
    assert forms is not None, "a profiled step has them"
    tables = forms.tables

    def tables_outside() -> list[Table | str]:
        pairs = zip(chain.blocks, tables(), strict=True)
        return [INSIDE if overlap(block.fqn, decoder) else table for block, table in pairs]

    forms = ChunkForms(chain, tables_outside)
    found = forms.choose(None, recompute=again)
    chunked = {name: form for name, form in found.forms.items() if form >= CHUNKED}
    if not chunked:
        raise PlanError(
            f"chunk cannot be used with {', '.join(made.whole.strategies)}: outside of {decoder!r} no block"
            " takes less of the step's peak in"
            f" chunks{' than where it runs again' * again}{f': {forms.reason}' if forms.reason else ''};"
            " leave chunk out"
        )
    whole = (*found.recomputed, *(name for name, form in chunked.items() if forms.form(name, form).again))
    saved = {name: n_bytes for name, n_bytes in saved_bytes(chain).items() if name in whole}
    rules = [*recomputed(saved, f"{BY_USER} (outside of the decoder; it keeps {{}} less)")]
    for name, form in chunked.items():
        target = in_chunks(forms, name, form, len(chunked))
        rules.append(
            Rule(
                fqn=name,
                spec=target.spec,
                strategy="chunk",
                why=f"{BY_USER} ({target.why})",
                saves_bytes=target.saves_bytes,
            )
        )
    return with_rules(made.whole, rules, seconds=found.extra_seconds)


def outside(chain: Chain, decoder: str) -> Chain:
    """A chain in which the decoder's parts, which have their own techniques, stay as they are."""
    blocks = (replace(b, fixed=INSIDE) if overlap(b.fqn, decoder) else b for b in chain.blocks)
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
