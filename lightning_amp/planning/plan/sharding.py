"""Define how fsdp shards: over which ranks, and where the shards lie; the same in all rules of a plan.

Legend: D ranks that average gradients, S of a group among which parameters are split; all D / S groups have the same.
"""

from collections.abc import Iterable
from dataclasses import replace

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.fsdp.spec import FullyShard

ON_HOST = (
    "fsdp_offload saves nothing on a CPU, whose memory is the host's; on a GPU it keeps parameters, gradients and"
    " optimiser state out of the device's"
)


def sharding_of(rules: Iterable[Rule]) -> FullyShard | None:
    """What a plan's rules say of fsdp, the same in all rules; None where there is none."""
    return next((rule.spec for rule in rules if isinstance(rule.spec, FullyShard)), None)


def with_sharding(plan: Plan, asked: FullyShard | None, *, launches: bool) -> Plan:
    """The same plan whose fsdp, if it has any, splits as was asked; None leaves it as it is.

    Args:
        asked: By the options of a person, or by a plan's own rules.
        launches: Whether the device is another one than the host's processor.

    Raises:
        PlanError: The ranks cannot be divided like that.
    """
    if asked is None:
        return plan
    if why := asked.no_groups_of(plan.gradient_ranks):
        raise PlanError(f"fsdp_ranks={asked.shard_ranks!r} is not supported, {why}")
    rules = tuple(
        replace(rule, spec=asked) if isinstance(rule.spec, FullyShard) else rule for rule in plan.rules
    )
    notes = (ON_HOST,) if asked.offload and not launches and ON_HOST not in plan.notes else ()
    return replace(plan, rules=rules, notes=(*plan.notes, *notes))
