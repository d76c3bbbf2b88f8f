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
MAY_TAKE = "a rank may take {} of what is free there"


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
        return replace(rule, spec=replace(spec, host_memory=max(0, room - others)))

    return tuple(map(bounded, rules))


def page_locked(n_bytes: int) -> int:
    """Return the bytes that torch takes for a tensor in page-locked host memory: the next power of two."""
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


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


def room_of(spec: Any, seen: ProfiledStep, others: Iterable[Rule] = ()) -> int | None:
    """Return the bytes of host memory that a technique may take beside other rules; None for any."""
    limit: int | None = seen.host_room if spec.host_memory is None else spec.host_memory
    return None if limit is None else max(0, limit - host_bytes_of(others))


def no_room(what: str, n_bytes: int, spec: Any, seen: ProfiledStep, others: Iterable[Rule] = ()) -> str:
    """Return why `n_bytes` of host memory are too many beside what other rules take; "" if they are not."""
    room, taken = room_of(spec, seen, others), host_bytes_of(others)
    if room is None or n_bytes <= room:
        return ""
    beside = " and what else waits there" if taken else ""
    limit = MAY_TAKE.format(format_bytes(seen.host_room or 0))
    if spec.host_memory is not None:
        limit = f"host_memory is {format_bytes(spec.host_memory)}"
    return f"{what}{beside} takes {format_bytes(taken + n_bytes)} of host memory, and {limit}"


def refuse_beyond(rules: Sequence[Rule], room: int) -> None:
    """Raise a PlanError if a plan, of which a rule has no bound of its own, takes more host memory than is free."""
    bounded, taken = all(getattr(rule.spec, "host_memory", 0) is not None for rule in rules), host_bytes_of(rules)
    if not bounded and taken > room:
        raise PlanError(
            f"the given plan takes {format_bytes(taken)} of host memory, and {MAY_TAKE.format(format_bytes(room))};"
            " make the plan again on this machine, or free memory of the host"
        )


def host_bytes_of(rules: Iterable[Rule]) -> int:
    """Return the bytes of host memory of rules; all rules of a technique have one spec."""
    specs = {rule.strategy: rule.spec for rule in rules}
    return sum(getattr(spec, "host_bytes", 0) for spec in specs.values())
