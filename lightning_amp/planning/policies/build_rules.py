"""Build a plan's rules from strategies (target modules, reason, bytes saved), and decide whether to balance cells."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.ordered_runs import speeds_of_model
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.diagnosis import Diagnosis
from lightning_amp.errors import PlanError
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Explanation, Plan
from lightning_amp.planning.time.step_seconds import settle, strata_ends
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.data.row import BalanceCells, DataParallel, ShareBatchStatistics
from lightning_amp.techniques.hic.rows import FeatureParallel, StrataParallel
from lightning_amp.techniques.table import STRATEGIES, targets_of

_SHARED = Rule(
    fqn="*",
    spec=ShareBatchStatistics(),
    strategy="S1",
    why="batch statistics over all ranks, or the result would depend on the number of ranks",
)


BALANCE_FROM = 0.02
"""Expected excess of the busiest rank's contacts over the mean, from which balancing the cells is worthwhile."""
UNLIKE = "memory of the devices by rank: "
BY_USER = "requested by the user"


def build_rules(
    chosen: tuple[str, ...], shape: ModelShape, mesh: MeshShape, diagnosis: Diagnosis, *, balance: bool, policy: str
) -> tuple[Rule, ...]:
    """Build the rules of a plan in the order of installation: data axis, then modules, by strategy number.

    `policy` says who chose the strategies: "auto", "paper", or "strategies" for the user.

    Raises:
        PlanError: A strategy finds nothing to change in a model of this shape.
    """
    rules, noun = list[Rule](), "rank" if mesh.data == 1 else "ranks"
    if "S1" in chosen:
        rules.append(Rule(fqn="", spec=DataParallel(), strategy="S1", why=f"{mesh.data} {noun} on the data axis"))
        rules += [_SHARED] if mesh.data > 1 and shape.batch_norms else []
        why = "contacts per cell vary, and the slowest rank sets the pace"
        rules += [Rule(fqn="", spec=BalanceCells(), strategy="S1", why=why)] if balance else []
    axes = Axes.of(chosen)
    for strategy in (s for s in chosen if s != "S1"):
        finding = diagnosis.finding(STRATEGIES[strategy].signal)
        why = f"{finding.signal}: {finding.evidence}" if finding else "no signal suggests it"
        if policy == "auto" and not STRATEGIES[strategy].registered:
            why = "part of the fastest plan that fits"
        # if strata or anchors are sharded, a decoder's features are not sharded as well
        targets = [
            (fqn, spec)
            for fqn, spec in targets_of(strategy, shape)
            if not isinstance(spec, FeatureParallel) or axes.features == "sharded"
        ]
        if not targets:
            raise PlanError(
                f"{strategy} ({STRATEGIES[strategy].title}) finds nothing to change in this model; leave {strategy} out"
            )
        others = tuple(s for s in chosen if s != strategy)
        without, peak = (predict(shape, names, model_ranks=mesh.model).peak_bytes for names in (others, chosen))
        for n, (fqn, spec) in enumerate(targets):
            rules.append(
                Rule(
                    fqn=fqn,
                    spec=settle(strategy, spec, shape, axes, mesh),
                    strategy=strategy,
                    why=f"{BY_USER} ({why})" if policy == "strategies" else why,
                    # bytes saved by the strategy, which the first of its rules shows
                    saves_bytes=0 if n else max(0, without - peak),
                )
            )
    return tuple(rules)


def decide_balance(profile: Profile, mesh: MeshShape, batch_size: int) -> tuple[bool, list[str]]:
    """Return whether contacts per cell vary so much that ranks would wait for each other, and the reason.

    The sum over B cells has a relative standard deviation of spread / sqrt(B). The largest of R such sums exceeds their
    mean by about that times the expected maximum of R standard normal numbers (Blom's approximation).
    """
    spreads = [m.contact_spread for m in profile.modalities if m.decomposition is not None and m.contact_spread]
    if mesh.data == 1 or not spreads:
        return False, []
    largest = NormalDist().inv_cdf((mesh.data - 0.375) / (mesh.data + 0.25))
    excess = max(spreads) / batch_size**0.5 * largest
    return excess >= BALANCE_FROM, [
        Explanation(
            f"contacts per cell vary by {100 * max(spreads):.0f} %: in a random step of {batch_size} cells per rank the"
            f" busiest rank would have {100 * excess:.1f} % more than the mean"
        )
    ]


def too_few_cells(profile: Profile, mesh: MeshShape, batch_size: int) -> list[str]:
    """Return a note if a step takes more cells than a modality has."""
    step = mesh.data * batch_size
    few = [f"{m.name} has {m.cells:,}" for m in profile.modalities if 0 < m.cells < step]
    if not few:
        return []
    return [
        f"a step has {mesh.data:,} x {batch_size:,} = {step:,} cells, and {', '.join(few)}: some cells come"
        " more than once in a step; choose fewer cells per rank, or fewer ranks on the data axis"
    ]


def with_balance(plan: Plan, *, balance: bool) -> Plan:
    """Return the plan with cells balanced over the ranks, or not."""
    if balance == plan.balance_cells:
        return plan
    rules = tuple(rule for rule in plan.rules if not isinstance(rule.spec, BalanceCells))
    if balance and "S1" in plan.strategies:
        rules = (*rules, Rule(fqn="", spec=BalanceCells(), strategy="S1", why=BY_USER))
    return replace(plan, rules=rules, balance_cells=balance and "S1" in plan.strategies)


def with_requested(plan: Plan, requested: Mapping[str, Spec], shape: ModelShape, *, launches: bool = False) -> Plan:
    """Return the plan with the specs that the user requested, by technique.

    Args:
        launches: Whether the device is an accelerator.

    Raises:
        PlanError: This mesh or model does not support a spec.
    """
    for strategy, spec in requested.items():
        if (check := STRATEGIES[strategy].contradictions) is not None:
            for why in check([spec], plan.gradient_ranks):
                raise PlanError(why)
        if plan.gradient_ranks < (needed := getattr(spec, "needs_ranks", 1)):
            raise PlanError(
                f"{strategy} needs {needed} ranks of the data axis, and there is {plan.gradient_ranks}; use more"
                " devices, a smaller model_parallel_size, options with which one rank is enough (fsdp_offload=True), or"
                f" leave {strategy} out"
            )

    def asked(rule: Rule) -> Rule:
        spec = requested.get(rule.strategy)
        if spec is None or STRATEGIES[rule.strategy].steps:
            return rule
        return replace(rule, spec=settle(rule.strategy, spec, shape, plan.axes, plan.mesh))

    notes = (*plan.notes, *remarks(requested, launches=launches))
    return replace(plan, rules=tuple(map(asked, plan.rules)), notes=notes)


def remarks(specs: Mapping[str, Spec], *, launches: bool) -> list[str]:
    """Return notes on specs, by technique, for an accelerator (`launches`) or a CPU."""
    rows = ((STRATEGIES[strategy].remark, spec) for strategy, spec in specs.items())
    found = (remark(spec, launches) for remark, spec in rows if remark is not None)
    return [note for note in found if note]


def with_memory(plan: Plan, memory: tuple[int, ...]) -> Plan:
    """Add a note if devices have different memory."""
    if len(memory) < 2:
        return plan
    use = "stages are cut by that of their own rank"
    if not plan.stages:
        use = f"ranks hold the same, so that the least counts for all, {format_bytes(min(memory))}"
    note = Explanation(f"{UNLIKE}{', '.join(map(format_bytes, memory))}; {use}")
    return replace(plan, notes=(*(said for said in plan.notes if not said.startswith(UNLIKE)), note))


def with_speeds(plan: Plan, shape: ModelShape, speeds: tuple[float, ...]) -> Plan:
    """Return the plan for ranks of these relative speeds, empty if equal: strata are distributed by speed.

    Stages get their speeds in techniques/pipeline/stages.py.
    """
    if not speeds:
        return plan
    own = speeds_of_model(speeds, plan.mesh.model)
    listed = ", ".join(f"{speed:.2f}" for speed in speeds)
    note = Explanation(f"speeds of the ranks, by that of the fastest: {listed}")

    def dealt(rule: Rule) -> Rule:
        if not isinstance(rule.spec, StrataParallel):
            return rule
        cut = strata_ends(shape, plan.axes, ranks=plan.mesh.model, speeds=own)
        return replace(rule, spec=replace(rule.spec, ends=",".join(map(str, cut))))

    made = replace(plan, rules=tuple(map(dealt, plan.rules)), notes=(*plan.notes, note))
    ends = ends_of(made)
    if not ends:
        return made
    # the fastest rank has more strata than its share, and requires their memory
    found = predict(shape, made.strategies, model_ranks=made.mesh.model, axes=made.axes, ends=ends)
    return replace(made, predicted_peak_bytes=found.peak_bytes, strata_bytes=found.strata_bytes)


def ends_of(plan: Plan) -> tuple[int, ...]:
    """Return the end of each rank's range of strata, from a rule of strata parallelism; empty without one."""
    spec = next((rule.spec for rule in plan.rules if isinstance(rule.spec, StrataParallel)), None)
    return () if spec is None else tuple(int(end) for end in spec.ends.split(",") if end.isdecimal())


def without_shared_statistics(plan: Plan) -> Plan:
    """Return the plan with batch statistics per rank."""
    return replace(plan, rules=tuple(r for r in plan.rules if not isinstance(r.spec, ShareBatchStatistics)))


def with_shared_statistics(plan: Plan) -> Plan:
    """Return the plan with batch statistics over all ranks of the data axis, for a model that has BatchNorm."""
    shared = any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules)
    if shared or plan.mesh.data == 1 or "S1" not in plan.strategies:
        return plan
    return replace(plan, rules=(*plan.rules, _SHARED))
