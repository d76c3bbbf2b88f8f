"""How much host memory the techniques of a rank may take together: option `host_memory`, or most of what is free."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import environ
from typing import Any, TypeVar

import psutil

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.quantities import format_bytes, parse_bytes

S = TypeVar("S", bound=Any)
SHARE = 0.8
"""Share of the host's free memory that the ranks of a node take at most."""


def free_bytes(node_ranks: int = 1) -> int:
    """Return the bytes of host memory that this process may take, as one of so many ranks of its node."""
    # a launcher may have started more than the Trainer knows of
    ranks = max(node_ranks, int(environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(SHARE * psutil.virtual_memory().available / ranks)


def within(rules: Sequence[Rule], room: int) -> tuple[Rule, ...]:
    """Return rules in which each technique may take what is left of so many bytes, unless it has a bound of its own."""

    def bounded(rule: Rule) -> Rule:
        spec: Any = rule.spec
        if getattr(spec, "host_memory", room) is not None:
            return rule
        others = host_bytes_of(other for other in rules if other.strategy != rule.strategy)
        return replace(rule, spec=replace(spec, host_memory=room - others))

    return tuple(map(bounded, rules))


def with_requested(spec: S, request: Any) -> tuple[S, bool]:
    """Return a spec with `host_memory` of a request; the rest is chosen for the step.

    Raises:
        PlanError: It is no size.
    """
    found = host_memory_of(request)
    return (spec if found is None else replace(spec, host_memory=found)), False


def host_memory_of(request: Any) -> int | None:
    """Return the bytes of `host_memory` of a request, None if it has none; raises a PlanError if it is no size."""
    found = getattr(request, "host_memory", None)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | str):
        raise PlanError(f'host_memory={found!r} is not supported; allowed is a size such as "64GiB", or None')
    return parse_bytes(str(found))


def bounded(spec: S, seen: ProfiledStep) -> S:
    """Return a spec with the bound of the step where a technique of the policy has none of its own."""
    return spec if spec.host_memory is not None else replace(spec, host_memory=seen.host_memory)


def no_room(what: str, n_bytes: int, spec: Any, others: Iterable[Rule] = ()) -> str:
    """Return why `n_bytes` of host memory are too many beside what other rules take; "" if they are not."""
    taken, limit = host_bytes_of(others), spec.host_memory
    if limit is None or taken + n_bytes <= limit:
        return ""
    beside = " and what else waits there" if taken else ""
    return (
        f"{what}{beside} takes {format_bytes(taken + n_bytes)} of host memory, and host_memory is {format_bytes(limit)}"
    )


def host_bytes_of(rules: Iterable[Rule]) -> int:
    """Return the bytes of host memory of rules; all rules of a technique have one spec."""
    specs = {rule.strategy: rule.spec for rule in rules}
    return sum(getattr(spec, "host_bytes", 0) for spec in specs.values())
