"""Predict the seconds of fsdp's collectives, which replace one average of all gradients.

    among S ranks           of every unit two all-gathers of its parameters, one reduce-scatter of their gradients
    between D / S groups    of every unit one all-reduce of a rank's rows of gradients
    rows on the host        through its link: the rows for each gather, and those of gradients back; the optimiser goes
                            over rows, gradients and state there

Where D ranks are several nodes, groups of a node's ranks gather through the links inside of it, and 1 / S of the
gradients passes between nodes; one group of all ranks holds less.

Known limits: transfers do not overlap with computation; what ranks compare before they gather (ranks/agreement.py) is
not counted. Legend: D ranks of the data axis, S of them among which parameters are split.
"""

from collections.abc import Sequence

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.link_seconds import collective_seconds
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterUnit
from lightning_amp.techniques.fsdp.spec import FullyShard

MESSAGES = 3
"""Of a unit among the ranks that it is split over."""
HANDLING_S = 3.3e-3
"""Of a message on a CPU, where nothing hides it: torch's hooks, the copies into and out of what is sent, gloo's threads
besides the computation. By hand FSDP2 takes 8 to 14 ms more than ddp for each unit of five of the examples, three
messages each, on two ranks of one core (docs/reports/any_module.md)."""
PASSES = 2
"""Times that a rank's core of the host goes over rows, gradients and state in an optimiser's step: Adam, measured on
one core."""


def fsdp_seconds(step: ProfiledStep, units: Sequence[ParameterUnit], spec: FullyShard, ranks: int) -> float:
    """Seconds of a step beyond those of one that averages gradients over D ranks; never below 0."""
    shard, links = spec.shard_ranks or ranks, step.rates.links
    whole = sum(unit.whole_bytes() for unit in units)
    handling = 0.0 if step.rates.launches or shard == 1 else HANDLING_S
    sent = -collective_seconds("all_reduce", whole, ranks, links)
    for own in filter(None, (unit.whole_bytes() for unit in units)):
        sent += 2 * collective_seconds("all_gather", own / shard, shard, links)
        sent += collective_seconds("reduce_scatter", own, shard, links)
        sent += collective_seconds("all_reduce", own / shard, ranks // shard, links, inner=shard)
        sent += MESSAGES * handling
    return max(0.0, sent) + (_host_seconds(step, whole, shard) if spec.offload else 0.0)


def _host_seconds(step: ProfiledStep, whole: int, shard: int) -> float:
    """On a CPU rows pass no link, and the optimiser works where it would anyway."""
    if not step.rates.launches:
        return 0.0
    moved, updated = 3 * whole / shard, PASSES * step.held_bytes / shard
    return moved / step.rates.host_bandwidth + updated / CPU_CORE.memory_bytes
