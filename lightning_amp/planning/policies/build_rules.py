"""Build the rules of a decoder's plan, and decide whether to balance cells."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.ordered_runs import speeds_of_model
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.base.rules import build_rules, with_requested
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Explanation, Plan
from lightning_amp.planning.time.step_seconds import settle, strata_ends
from lightning_amp.profiling.profile import Profile
from lightning_amp.techniques.hic.rows import FeatureParallel, StrataParallel
from lightning_amp.techniques.table import targets_of
from lightning_amp.techniques.technique import Target

BALANCE_FROM = 0.02
"""Expected excess of the busiest rank's contacts over the mean, from which balancing the cells is worthwhile."""


def rules_of_decoder(
    chosen: tuple[str, ...], request: PlanRequest, mesh: MeshShape, *, balance: bool
) -> tuple[Rule, ...]:
    """Build the rules of a plan of a decoder, as `build_rules` of any module.

    Raises:
        PlanError: A strategy finds nothing to change in a decoder of this shape.
    """
    shape, axes = request.shape, Axes.of(chosen)

    def targets(strategy: str) -> list[Target]:
        # if strata or anchors are sharded, a decoder's features are not sharded as well
        whole = axes.features != "sharded"
        return [one for one in targets_of(strategy, shape) if not (whole and isinstance(one[1], FeatureParallel))]

    def peak_bytes(names: tuple[str, ...]) -> int:
        return predict(shape, names, model_ranks=mesh.model).peak_bytes

    rules = build_rules(chosen, request, mesh, targets=targets, peak_bytes=peak_bytes, balance=balance)
    return tuple(settle(rule, shape, axes, mesh) for rule in rules)


def with_requested_specs(plan: Plan, requested: Mapping[str, Spec], shape: ModelShape, *, launches: bool) -> Plan:
    """Return the plan of a decoder with the specs that the user requested, as `with_requested` of any module."""
    made = with_requested(plan, requested, shape, launches=launches)
    return replace(made, rules=tuple(settle(rule, shape, plan.axes, plan.mesh) for rule in made.rules))


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


def with_strata_by_speed(plan: Plan, shape: ModelShape, speeds: tuple[float, ...]) -> Plan:
    """Return the plan with strata distributed by the relative speeds of the ranks, empty if they are equal."""
    if not speeds or not ends_of(plan):
        return plan
    cut = strata_ends(shape, plan.axes, ranks=plan.mesh.model, speeds=speeds_of_model(speeds, plan.mesh.model))

    def dealt(rule: Rule) -> Rule:
        if not isinstance(rule.spec, StrataParallel):
            return rule
        return replace(rule, spec=replace(rule.spec, ends=",".join(map(str, cut))))

    # the fastest rank has more strata than its share, and requires their memory
    found = predict(shape, plan.strategies, model_ranks=plan.mesh.model, axes=plan.axes, ends=cut)
    return replace(
        plan,
        rules=tuple(map(dealt, plan.rules)),
        predicted_peak_bytes=found.peak_bytes,
        strata_bytes=found.strata_bytes,
    )


def ends_of(plan: Plan) -> tuple[int, ...]:
    """Return the end of each rank's range of strata, from a rule of strata parallelism; empty without one."""
    spec = next((rule.spec for rule in plan.rules if isinstance(rule.spec, StrataParallel)), None)
    return () if spec is None else tuple(int(end) for end in spec.ends.split(",") if end.isdecimal())
