"""Install a technique that replaces the module's steps: its options, and what it does not support."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from math import inf
from types import SimpleNamespace

import lightning.pytorch as pl
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.dist.own_parts import OwnParts
from lightning_amp.dist.splits import axis_of
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.lightning.profiling.dry_steps import DrySteps, put_steps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.strategy.hardware import ThisRank, memory_in
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.planning.modules.candidates import TIE
from lightning_amp.planning.modules.plan_module import plan_module
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.table import PREDICTIONS, STRATEGIES, parse_strategies, refuse_apart, with_steps

SLOW_SECONDS = 0.5
"""Of a step, spent on other things than computation."""


def dry_steps(request: Request, here: ThisRank, trained: Plan | None) -> DrySteps | None:
    """The technique that a request names, or that the plan of a fit before had, for rank 0 of its model axis.

    Raises:
        PlanError: A value outside what is allowed.
    """
    plan = trained if request.plan is None else _given(request)
    if plan is not None and (name := with_steps(plan.strategies)):
        return DrySteps(name, _rule_of(name, plan.rules).spec, plan.mesh.model, run_ranks=here.n_ranks)
    size = request.model_parallel_size
    ranks = here.node_ranks if size == "auto" else int(size)
    strategies = parse_strategies(request.strategies or "S1")
    if not with_steps(strategies):
        return None
    of_run = {"run_ranks": here.n_ranks, "budget": min(memory_in(request, here))}
    steps = DrySteps.asked(strategies, request, ranks, **of_run)
    if steps is not None:
        steps.check_ranks()
    return steps


def own_parts_of(request: Request, plan: Plan | None, here: ThisRank) -> OwnParts:
    """The place of a rank in the model axis; before a plan is made, of the size that a person has given.

    Args:
        request: The options of the strategy.
        plan: The plan in force, if it is made.
        here: The rank.
    """
    given = _given(request) if plan is None else plan
    asked = 0 if request.model_parallel_size == "auto" else request.model_parallel_size
    size = given.mesh.model if given is not None else asked if here.n_ranks > 1 else 1
    splits = plan is not None and bool(with_steps(plan.strategies))
    even = request.sequence_sizes == "even" and not request.sequence_grid
    dims = request.sequence_dim if even and isinstance(request.sequence_dim, Mapping) else {}
    return OwnParts(
        rank=here.rank % max(size, 1),
        size=size,
        axis=(lambda: axis_of(here.mesh_of(size)["model"])) if splits else None,
        dims={path: (own,) if isinstance(own, int) else tuple(own) for path, own in dims.items()},
    )


def is_slow(plan: Plan, seen: ProfiledStep) -> bool:
    """Whether a plan with more than data parallelism takes so much longer than computation that to look for a faster
    one, which takes seconds, is worth it."""
    more = _pace(plan) - seen.seconds
    return set(plan.strategies) > {"S1"} and more > max(seen.seconds, SLOW_SECONDS)


def in_parts(
    whole: Plan, step: StepOfModule, make: Callable[..., Plan], rates: Rates, here: ThisRank
) -> Plan:
    """A plan that splits every sample or layer: the fastest that fits where no other plan fits, or where it is faster
    than a slow one; without one the plan as it is.

    Args:
        whole: The plan without such a technique; where it does not fit that which needs least.
        step: The module's.
        make: Makes a plan without a profile, of `asked` strategies, `size` of the model axis and `steps`.
        rates, here: Of the device, of the run.
    """
    found = list[tuple[str, Plan]]()
    for name, row in STRATEGIES.items():
        # what splits layers only may cross nodes, and be faster than a plan that fits
        n = here.n_ranks if row.data_axis else here.node_ranks
        if not row.steps or n < 2 or not (row.data_axis or whole.fits is False):
            continue
        of_run = {"run_ranks": here.n_ranks, "budget": whole.budget_bytes}
        steps = DrySteps.asked((name,), SimpleNamespace(), here.node_ranks, **of_run)
        assert steps is not None, "it has steps"
        counted = step.with_steps(steps)
        try:
            seen = counted.profiled(rates)
            base = make(asked=["S1", name], size=steps.ranks, steps=steps)
            made = [plan_module(base, seen, named=(), count=counted.count)]
            others = [other for other in row.together if other in PREDICTIONS]
            # one technique more only where fewer do not fit; of as many the fastest
            for n in range(1, len(others) + 1):
                if any(plan.fits for plan in made):
                    break
                for more in combinations(others, n):
                    # what this step cannot have is left out
                    with suppress(AmpError):
                        made.append(plan_module(base, seen, named=more, count=counted.count))
            if fitting := [plan for plan in made if plan.fits]:
                found.append((name, min(fitting, key=_pace)))
                continue
            least = min(made, key=lambda plan: plan.predicted_peak_bytes)
            why = f"{', '.join(least.strategies)} needs {format_bytes(least.predicted_peak_bytes)} on as many ranks"
        except AmpError as error:
            why = f"{name} is not possible: {error}"
        whole = replace(whole, notes=(*whole.notes, Explanation(why)))
    name, best = min(found, key=lambda one: _pace(one[1]), default=("", whole))
    if not name or (whole.fits and _pace(best) * TIE > _pace(whole)):
        return whole
    return _chosen(best, name, whole, found)


def _pace(plan: Plan) -> float:
    """Seconds of a step by how many batches of the loader a rank has in it."""
    return (plan.predicted_step_seconds or inf) * plan.mesh.model


def _chosen(best: Plan, name: str, whole: Plan, found: Sequence[tuple[str, Plan]]) -> Plan:
    """A plan that a policy takes."""
    if whole.fits:
        why = f"{', '.join(whole.strategies)} takes {_pace(whole) / _pace(best):.1f} times as long"
    else:
        why = f"every plan that leaves samples whole needs {format_bytes(whole.predicted_peak_bytes)} or more"
    slower = [
        f"{other} takes {_pace(plan) / _pace(best):.1f} times as long"
        for other, plan in found
        if other != name
    ]
    why = "; ".join([why, *slower])
    rules = (replace(rule, why=why) if rule.strategy == name else rule for rule in best.rules)
    return replace(
        best,
        policy=whole.policy,
        rules=tuple(rules),
        notes=(*best.notes, Explanation(f"{name} was taken: {why}")),
    )


def install_steps(module: pl.LightningModule, plan: Plan, mesh: DeviceMesh) -> Callable[[], None]:
    """Put the steps of a plan's technique in the place of a module's; returns what undoes it.

    Raises:
        PlanError: A technique of the plan that does not go together with it, or a module that it does not support.
    """
    name = with_steps(plan.strategies)
    if not name:
        return lambda: None
    refuse_apart(plan.strategies)
    if decoders := list(find_decoders(module)):
        raise PlanError(
            f"{name} is not supported: {decoders[0]!r} is a decomposed decoder; use 'nodes', which splits"
            " its anchors over the model axis"
        )
    return put_steps(module, name, _rule_of(name, plan.rules).spec, mesh["model"])


def _given(request: Request) -> Plan | None:
    """The plan to carry out."""
    given = request.plan
    return given if given is None or isinstance(given, Plan) else Plan.read(given)


def _rule_of(name: str, rules: Iterable[Rule]) -> Rule:
    return next(rule for rule in rules if rule.strategy == name)
