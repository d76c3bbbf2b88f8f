"""Strategies -> rules: which modules each chosen strategy changes, why, and what it is predicted to save."""

from dataclasses import replace

from lightning_amp.diagnosis.diagnose import ATTENTION_DECODER, HEAVY_DECOMPOSITION, HIGH_INPUT_DIMENSIONALITY
from lightning_amp.diagnosis.diagnosis import Diagnosis
from lightning_amp.planning.memory import chunk_buckets, estimate
from lightning_amp.planning.plan import Axes, MeshShape, Plan, Rule
from lightning_amp.planning.shape import ModelShape
from lightning_amp.planning.specs import (
    BalanceCells,
    ChunkedAttention,
    DataParallel,
    FeatureParallel,
    HiddenParallel,
    KeyFirstDecode,
    RowParallelLinear,
    ShareBatchStatistics,
    Spec,
)

ASKED_BY = {
    "S2": HIGH_INPUT_DIMENSIONALITY,
    "S3": ATTENTION_DECODER,
    "S4": HIGH_INPUT_DIMENSIONALITY,
    "S5": HEAVY_DECOMPOSITION,
}
WITHOUT = {
    "S2": {"features": "all"},
    "S3": {"attention": "eager"},
    "S4": {"decode": "full"},
    "S5": {"placement": "replicated"},
}


def build_rules(
    chosen: tuple[str, ...],
    shape: ModelShape,
    axes: Axes,
    mesh: MeshShape,
    diagnosis: Diagnosis,
    *,
    balance: bool,
    user: bool,
) -> tuple[Rule, ...]:
    """The rules of a plan in the order of installation: data axis first, then the decoder's leaves.

    Args:
        chosen: Strategy ids.
        shape: The model.
        axes: The decoder's choices.
        mesh: Ranks per axis.
        diagnosis: The findings that asked for the strategies.
        balance: Whether contacts are balanced over the ranks.
        user: Whether the user named the strategies.
    """
    rules = _data_rules(mesh, balance=balance) if "S1" in chosen else []
    for strategy in (s for s in chosen if s != "S1"):
        finding = diagnosis.finding(ASKED_BY[strategy])
        why = f"{finding.signal}: {finding.evidence}" if finding else "no signal asks for it"
        whole = estimate(shape, replace(axes, **WITHOUT[strategy]), model_ranks=mesh.model).peak_bytes
        saved = max(0, whole - estimate(shape, axes, model_ranks=mesh.model).peak_bytes)
        for n, (fqn, spec) in enumerate(_targets(strategy, shape)):
            rules.append(
                Rule(
                    fqn=fqn,
                    spec=spec,
                    strategy=strategy,
                    why=f"asked for by the user ({why})" if user else why,
                    # of the strategy as a whole, shown once
                    saves_bytes=0 if n else saved,
                )
            )
    return tuple(rules)


def with_balance(plan: Plan, *, balance: bool) -> Plan:
    """The same plan with cells balanced over the ranks, or not."""
    if balance == plan.balance_cells:
        return plan
    rules = tuple(rule for rule in plan.rules if not isinstance(rule.spec, BalanceCells))
    if balance and "S1" in plan.strategies:
        rules = (*rules, Rule(fqn="", spec=BalanceCells(), strategy="S1", why="asked for by the user"))
    return replace(plan, rules=rules, balance_cells=balance and "S1" in plan.strategies)


def without_shared_statistics(plan: Plan) -> Plan:
    """The same plan with batch statistics per rank."""
    return replace(plan, rules=tuple(r for r in plan.rules if not isinstance(r.spec, ShareBatchStatistics)))


def _data_rules(mesh: MeshShape, *, balance: bool) -> list[Rule]:
    noun = "rank" if mesh.data == 1 else "ranks"
    rules = [Rule(fqn="", spec=DataParallel(), strategy="S1", why=f"{mesh.data} {noun} on the data axis")]
    if mesh.data > 1:
        why = "batch statistics over all ranks, or the result would depend on the number of ranks"
        rules.append(Rule(fqn="*", spec=ShareBatchStatistics(), strategy="S1", why=why))
    if balance:
        why = "contacts per cell vary, and the slowest rank sets the pace"
        rules.append(Rule(fqn="", spec=BalanceCells(), strategy="S1", why=why))
    return rules


def _targets(strategy: str, shape: ModelShape) -> list[tuple[str, Spec]]:
    """What a strategy changes: names or patterns of modules, and what to install there."""
    decoder = shape.decoder
    assert decoder is not None, "strategies beyond S1 need a decoder, which the policy has checked"
    if strategy == "S2":
        layers: list[tuple[str, Spec]] = [(fqn, RowParallelLinear()) for fqn in shape.wide_layers]
        return [(decoder.fqn, FeatureParallel()), *layers]
    if strategy == "S3":
        spec = ChunkedAttention(buckets=chunk_buckets(decoder.window))
        return [(f"{decoder.fqn}.strata.*.key.attention", spec)]
    if strategy == "S4":
        return [(f"{decoder.fqn}.strata.*.decode", KeyFirstDecode())]
    return [(decoder.fqn, HiddenParallel())]
