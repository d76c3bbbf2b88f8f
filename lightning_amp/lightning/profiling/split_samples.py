"""Compare plans whose techniques split samples or layers over ranks with a plan that leaves both whole.

A fit and a plan without a run call the same function, so that both have the same plan. Each technique that replaces the
module's steps (`sequence`, `tensor3d`) is profiled as rank 0 would run it, which takes seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import inf
from types import SimpleNamespace

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.profiled_step import TIE, ProfiledStep
from lightning_amp.errors import AmpError
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.evaluation_of_module import EvaluationOfModule
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.plan_module import plan_module
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import PREDICTIONS, STRATEGIES, works_with

SLOW_SECONDS = 0.5
"""Seconds of a step beyond its computation, above which a plan counts as slow."""


def samples_may_be_split(whole: Plan, seen: ProfiledStep) -> bool:
    """Whether no plan fits, or the plan has more than data parallelism and takes much longer than computation."""
    slow = set(whole.strategies) > {"S1"} and _batch_seconds(whole) - seen.seconds > max(seen.seconds, SLOW_SECONDS)
    return whole.fits is False or slow


def with_split_samples(
    whole: Plan, step: StepOfModule, *, base: Callable[[str, DrySteps], Plan], node_ranks: int, rates: Rates
) -> tuple[Plan, StepOfModule]:
    """Return the fastest fitting plan that splits samples or layers, if no other plan fits or the others are slower.

    Returns `whole` with notes if no such plan is better; and the step with which the plan was counted.

    Args:
        whole: The best plan without such a technique, or the one that needs least.
        step: The step on one device.
        base: Returns the plan with this technique alone, given its steps.
        node_ranks: Ranks of one node; only techniques on the data axis cross nodes.
        rates: Rates of the device.
    """
    found = list[tuple[str, Plan, StepOfModule]]()
    for name, dry in _ways(whole, node_ranks, trains=True):
        counted = step.with_steps(dry)
        try:
            seen = counted.profiled(rates)
            without = base(name, dry)
            made = [plan_module(without, seen, named=(), count=counted.count)]
            others = [other for other in works_with(name) if other in PREDICTIONS]
            # add further techniques only if fewer do not fit; of equally many, take the fastest plan
            for n in range(1, len(others) + 1):
                if any(plan.fits for plan in made):
                    break
                for more in combinations(others, n):
                    # combinations that this step does not support are skipped
                    with suppress(AmpError):
                        made.append(plan_module(without, seen, named=more, count=counted.count))
            if fitting := [plan for plan in made if plan.fits]:
                found.append((name, min(fitting, key=_batch_seconds), counted))
                continue
            least = min(made, key=lambda plan: plan.predicted_peak_bytes)
            why = f"{', '.join(least.strategies)} needs {format_bytes(least.predicted_peak_bytes)} on as many ranks"
        except AmpError as error:
            why = f"{name} is not possible: {error}"
        whole = replace(whole, notes=(*whole.notes, Explanation(why)))
    if not found:
        return whole, step
    name, best, counted = min(found, key=lambda one: _batch_seconds(one[1]))
    if not _is_better(best, whole):
        return whole, step
    if whole.fits:
        why = f"{', '.join(whole.strategies)} takes {_batch_seconds(whole) / _batch_seconds(best):.1f} times as long"
    else:
        why = f"every plan that leaves samples whole needs {format_bytes(whole.predicted_peak_bytes)} or more"
    slower = (
        f"{other} takes {_batch_seconds(plan) / _batch_seconds(best):.1f} times as long"
        for other, plan, _ in found
        if other != name
    )
    why = "; ".join([why, *slower])
    rules = tuple(replace(rule, why=why) if rule.strategy == name else rule for rule in best.rules)
    notes = (*best.notes, Explanation(f"{name} was taken: {why}"))
    return replace(best, policy=whole.policy, rules=rules, notes=notes), counted


def with_split_evaluation(
    whole: Plan,
    evaluation: EvaluationOfModule,
    *,
    base: Callable[[str, DrySteps], Plan],
    node_ranks: int,
    rates: Rates,
    notes: Sequence[str],
) -> Plan:
    """Return the fastest plan of an evaluation that fits: `whole`, or one that splits samples over the ranks of a node.

    Args:
        whole: The plan that leaves samples whole, in chunks.
        base: As in `with_split_samples`.
    """
    found = [whole] if whole.fits else []
    for name, dry in _ways(whole, node_ranks, trains=False):
        try:
            plan = evaluation.split(dry, partial(base, name, dry), rates, notes)
            why = f"{name} needs {format_bytes(plan.predicted_peak_bytes)} on as many ranks"
            if plan.fits and whole.fits:
                ratio = _batch_seconds(plan) / _batch_seconds(whole)
                why = f"{name} takes {ratio:.2f} times as long as whole samples in chunks"
            if plan.fits:
                found.append(plan)
        except AmpError as error:
            why = f"{name} is not possible: {error}"
        found = [replace(one, notes=(*one.notes, Explanation(why))) for one in found]
        whole = replace(whole, notes=(*whole.notes, Explanation(why)))
    best = min(found, key=_batch_seconds, default=whole)
    return replace(best, policy=whole.policy) if _is_better(best, whole) else whole


def _ways(whole: Plan, node_ranks: int, *, trains: bool) -> Iterator[tuple[str, DrySteps]]:
    """Yield the techniques that replace the module's steps over several ranks, with their steps."""
    ranks, budget = whole.mesh.ranks, whole.budget_bytes
    for name, row in STRATEGIES.items():
        # techniques on the data axis are for training: they may cross nodes, and be faster than a plan that fits
        wanted = (row.data_axis or whole.fits is False) if trains else not row.data_axis
        if row.steps and wanted and (ranks if row.data_axis else node_ranks) > 1:
            dry = DrySteps.of_request((name,), SimpleNamespace(), node_ranks, run_ranks=ranks, budget=budget)
            assert dry is not None, "it has steps"
            yield name, dry


def _is_better(split: Plan, whole: Plan) -> bool:
    """Whether a plan that splits samples or layers is taken: it must be faster by more than the tie margin."""
    return not whole.fits or _batch_seconds(split) * TIE <= _batch_seconds(whole)


def _batch_seconds(plan: Plan) -> float:
    """Seconds of a step per batch and rank: a model group of M ranks reads one batch, so a rank counts 1 / M of it."""
    return (plan.predicted_step_seconds or inf) * plan.mesh.model
