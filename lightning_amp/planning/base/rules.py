"""Build the rules of a plan from strategies, and change what a user may decide of them: specs, balance, statistics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import PlanError
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.data.row import BalanceCells, DataParallel, ShareBatchStatistics
from lightning_amp.techniques.table import STRATEGIES
from lightning_amp.techniques.technique import Target

_SHARED = Rule(
    fqn="*",
    spec=ShareBatchStatistics(),
    strategy="S1",
    why="batch statistics over all ranks, or the result would depend on the number of ranks",
)


UNLIKE = "memory of the devices by rank: "
BY_USER = "requested by the user"


def build_rules(
    chosen: tuple[str, ...],
    request: PlanRequest,
    mesh: MeshShape,
    *,
    targets: Callable[[str], Sequence[Target]],
    peak_bytes: Callable[[tuple[str, ...]], int],
    balance: bool = False,
) -> tuple[Rule, ...]:
    """Build the rules of a plan in the order of installation: data axis, then modules, by strategy number.

    Args:
        targets: Strategy -> what it changes in the module.
        peak_bytes: Strategies -> predicted peak of a plan with them.
        balance: Whether contacts of cells are balanced over the ranks.

    Raises:
        PlanError: A strategy finds nothing to change in a model of this shape.
    """
    rules, noun = list[Rule](), "rank" if mesh.data == 1 else "ranks"
    if "S1" in chosen:
        rules.append(Rule(fqn="", spec=DataParallel(), strategy="S1", why=f"{mesh.data} {noun} on the data axis"))
        rules += [_SHARED] if mesh.data > 1 and request.shape.batch_norms else []
        why = "contacts per cell vary, and the slowest rank sets the pace"
        rules += [Rule(fqn="", spec=BalanceCells(), strategy="S1", why=why)] if balance else []
    for strategy in (s for s in chosen if s != "S1"):
        finding = request.diagnosis.finding(STRATEGIES[strategy].signal)
        why = f"{finding.signal}: {finding.evidence}" if finding else "no signal suggests it"
        if request.chosen_by == "auto" and not STRATEGIES[strategy].registered:
            why = "part of the fastest plan that fits"
        found = targets(strategy)
        if not found:
            raise PlanError(
                f"{strategy} ({STRATEGIES[strategy].title}) finds nothing to change in this model; leave {strategy} out"
            )
        saved = max(0, peak_bytes(tuple(s for s in chosen if s != strategy)) - peak_bytes(chosen))
        why = f"{BY_USER} ({why})" if request.strategies is not None else why
        for n, (fqn, spec) in enumerate(found):
            # bytes saved by the strategy, which the first of its rules shows
            rule = Rule(fqn=fqn, spec=spec, strategy=strategy, why=why, saves_bytes=0 if n else saved)
            rules.append(settled(rule, request.shape, mesh))
    return tuple(rules)


def settled(rule: Rule, shape: ModelShape, mesh: MeshShape) -> Rule:
    """Return a rule whose spec has the fields that depend on the mesh."""
    own = STRATEGIES[rule.strategy].settle
    return rule if own is None else replace(rule, spec=own(rule.spec, shape, mesh.model))


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

    def with_spec(rule: Rule) -> Rule:
        spec = requested.get(rule.strategy)
        if spec is None or STRATEGIES[rule.strategy].steps:
            return rule
        return settled(replace(rule, spec=spec), shape, plan.mesh)

    notes = (*plan.notes, *remarks(requested, launches=launches))
    return replace(plan, rules=tuple(map(with_spec, plan.rules)), notes=notes)


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


def with_speeds(plan: Plan, speeds: tuple[float, ...]) -> Plan:
    """Add a note on the relative speeds of the ranks, empty if they are equal.

    Strata are dealt by them in policies/build_rules.py, stages in techniques/pipeline/stages.py.
    """
    if not speeds:
        return plan
    listed = ", ".join(f"{speed:.2f}" for speed in speeds)
    return replace(plan, notes=(*plan.notes, Explanation(f"speeds of the ranks, by that of the fastest: {listed}")))


def without_shared_statistics(plan: Plan) -> Plan:
    """Return the plan with batch statistics per rank."""
    return replace(plan, rules=tuple(r for r in plan.rules if not isinstance(r.spec, ShareBatchStatistics)))


def with_shared_statistics(plan: Plan) -> Plan:
    """Return the plan with batch statistics over all ranks of the data axis, for a model that has BatchNorm."""
    shared = any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules)
    if shared or plan.mesh.data == 1 or "S1" not in plan.strategies:
        return plan
    return replace(plan, rules=(*plan.rules, _SHARED))
