"""How the fsdp of a plan splits: among which ranks, and where their parts lie; the same in all its rules.

Legend: D ranks of the data axis, S of a group among which parameters are split; all D / S groups have the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.specs import FullyShard

if TYPE_CHECKING:
    from lightning_amp.planning.plan.plan import Plan, Rule

ON_HOST = (
    "fsdp_offload saves nothing on a CPU, whose memory is the host's; on a GPU it keeps parameters, gradients and"
    " optimiser state out of the device's"
)


def sharding_of(rules: Iterable["Rule"]) -> FullyShard | None:
    """What a plan's rules say of fsdp, all of them alike; None where there is none."""
    return next((rule.spec for rule in rules if isinstance(rule.spec, FullyShard)), None)


def with_sharding(plan: "Plan", asked: FullyShard | None, *, launches: bool) -> "Plan":
    """The same plan whose fsdp, if it has any, splits as was asked; None leaves it as it is.

    Args:
        asked: By the options of a person, or by a plan's own rules.
        launches: Whether the device is another one than the host's processor.

    Raises:
        PlanError: The data axis cannot be divided like that.
    """
    if asked is None:
        return plan
    if why := _not_a_group(asked.shard_ranks, plan.mesh.data):
        raise PlanError(f"fsdp_ranks={asked.shard_ranks!r} was asked for, {why}")
    rules = tuple(
        replace(rule, spec=asked) if isinstance(rule.spec, FullyShard) else rule for rule in plan.rules
    )
    notes = (ON_HOST,) if asked.offload and not launches and ON_HOST not in plan.notes else ()
    return replace(plan, rules=rules, notes=(*plan.notes, *notes))


def contradictions(rules: Iterable["Rule"], data: int) -> Iterator[str]:
    """What rules of a plan for D ranks of the data axis ask for that cannot be, one sentence each."""
    specs = list(dict.fromkeys(rule.spec for rule in rules if isinstance(rule.spec, FullyShard)))
    if len(specs) > 1:
        yield f"rules of fsdp ask for {specs[0]!r} and for {specs[1]!r}, which all of them do alike"
    for spec in specs:
        if type(spec.offload) is not bool:
            yield f"offload={spec.offload!r} of fsdp is neither true nor false"
        if why := _not_a_group(spec.shard_ranks, data):
            yield f"shard_ranks={spec.shard_ranks!r} of fsdp, {why}"


def _not_a_group(shard_ranks: int | None, data: int) -> str:
    """Why the data axis cannot be divided into groups of so many ranks, and what is allowed; "" where it can be."""
    if shard_ranks is None or (type(shard_ranks) is int and shard_ranks > 1 and data % shard_ranks == 0):
        return ""
    found = "1 rank" if data == 1 else f"{data} ranks"
    allowed = [n for n in range(2, data + 1) if data % n == 0]
    return (
        f"found {found} on the data axis, which is divided into groups of as many ranks, 2 or more; choose one of"
        f" {allowed!r}, or None for one group of all"
    )
