"""Whether a plan says what it would do: one that contradicts itself would train something else than it shows."""

from collections.abc import Iterator
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING

from lightning_amp.errors import PlanError
from lightning_amp.planning.conflicts import conflicts
from lightning_amp.planning.specs import BalanceCells, StreamStrata
from lightning_amp.planning.strategies import STRATEGIES

if TYPE_CHECKING:
    from lightning_amp.planning.plan import Plan


def check_consistency(plan: "Plan") -> None:
    """Refuse values of the wrong kind, and parts that do not belong together.

    Raises:
        PlanError: Names every contradiction.
    """
    problems = list(_kinds(plan)) or list(_contradictions(plan))
    if problems:
        raise PlanError(
            f"a plan was asked for that contradicts itself: {'; '.join(problems)}. Make the plan with"
            " `lightning-amp plan`, or edit all parts alike"
        )


def _kinds(plan: "Plan") -> Iterator[str]:
    counts = {name: getattr(plan, name) for name in ("predicted_base_bytes", "predicted_stratum_bytes")}
    counts |= {"predicted_peak_bytes": plan.predicted_peak_bytes, "batch_size": plan.batch_size}
    counts |= {f"strata_bytes[{k}]": n for k, n in enumerate(plan.strata_bytes)}
    counts |= {f"candidates[{i}].peak_bytes": c.peak_bytes for i, c in enumerate(plan.candidates)}
    if plan.budget_bytes is not None:
        counts["budget_bytes"] = plan.budget_bytes
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            yield f"{name}={value!r} is not a whole number of 0 or more"
    seconds = [c.step_seconds for c in plan.candidates] + [c.cell_seconds for c in plan.candidates]
    seconds += [n for n in (plan.predicted_step_seconds, plan.predicted_rest_seconds) if n is not None]
    yield from (f"a time of {n!r} is not a number above 0" for n in seconds if not _is_time(n))
    if type(plan.balance_cells) is not bool:
        yield f"balance_cells={plan.balance_cells!r} is neither true nor false"
    for name in ("signals", "evidence", "strategies", "notes"):
        if not all(isinstance(text, str) for text in getattr(plan, name)):
            yield f"{name}={getattr(plan, name)!r} holds something other than text"
    for name, texts in (
        ("rates_device", [plan.rates_device]),
        ("verdict", [c.verdict for c in plan.candidates]),
    ):
        yield from (f"{name}={text!r} is not text" for text in texts if not isinstance(text, str))
    yield from (f"fqn={rule.fqn!r} is not text" for rule in plan.rules if not isinstance(rule.fqn, str))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def _contradictions(plan: "Plan") -> Iterator[str]:
    unknown = sorted(set(plan.strategies) - set(STRATEGIES))
    if unknown:
        yield (
            f"strategies={unknown!r} are not of {', '.join(STRATEGIES)} (a package that registers them has to be"
            " imported first)"
        )
        return
    yield from conflicts(plan.strategies)
    ruled = {rule.strategy for rule in plan.rules}
    if ruled != set(plan.strategies):
        yield f"strategies={list(plan.strategies)!r}, but its rules are for {sorted(ruled)!r}"
    for rule in plan.rules:
        owner = next((s for s, info in STRATEGIES.items() if type(rule.spec) in info.specs), "of no strategy")
        if rule.strategy != owner:
            yield f"a rule of {rule.strategy} asks for {type(rule.spec).__name__}, which is {owner}"
    allowed = type(plan.axes).of(plan.strategies, (rule.spec for rule in plan.rules))
    for axis, choice in asdict(allowed).items():
        if getattr(plan.axes, axis) != choice:
            yield f"axes.{axis}={getattr(plan.axes, axis)!r}, with these strategies it is {choice!r}"
    together = plan.axes.features == "sharded" or plan.axes.placement not in ("replicated", "strata")
    for rule in plan.rules:
        if together and isinstance(rule.spec, StreamStrata) and rule.spec.workers != 1:
            yield f"workers={rule.spec.workers!r}, where ranks compute each stratum together, in one order: it is 1"
    if plan.balance_cells != any(isinstance(rule.spec, BalanceCells) for rule in plan.rules):
        yield f"balance_cells={plan.balance_cells!r}, and the rules say otherwise"
