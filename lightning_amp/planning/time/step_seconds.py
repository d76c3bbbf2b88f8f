"""What a training step of a decoder costs: operations, bytes, kernels and collectives, and from these its seconds.

    seconds of a part      flops / matmul rate  +  bytes / memory rate  +  kernels * overhead
    seconds of a stratum   its parts (operator_costs.py), a second forward pass under recompute, its collectives
                           (collectives.py)
    seconds of a step      those of all strata that the slowest rank has, the border's and the parameters' collectives

Operators run one after the other, each limited by its products or by the memory that it passes, so that the two times
add up: the roofline is taken operator by operator. Under strata parallelism a rank's strata are those that
`deal` gives it; in a chained decoder it also passes the strata before, there and back.

Known limits: the decoder only, without optimiser; collectives do not overlap with computation; the rank with most of
everything stands for all. The rates come from `device_rates.py`; comparisons between plans need no calibrated ones.
Legend: time_sizes.py.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.plan.model_shape import DecoderShape
from lightning_amp.planning.sizes.ordered_partition import deal
from lightning_amp.planning.sizes.terms import Term, strata_of
from lightning_amp.planning.time.collectives import (
    Collective,
    Traffic,
    border_traffic,
    gradient_numbers,
    stratum_traffic,
)
from lightning_amp.planning.time.device_rates import CPU_CORE, Rates
from lightning_amp.planning.time.operator_costs import PARTS, Part, parts, spine
from lightning_amp.planning.time.time_sizes import ELEMENT_BYTES, WorkSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one rank does.

    Attributes:
        flops: Operations of matrix products.
        bytes: Bytes that operators read and write.
        kernels: Operators.
        sent_bytes: Bytes handed to collectives.
        collectives: Calls of collectives.
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    sent_bytes: float = 0.0
    collectives: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
            kernels=self.kernels + other.kernels,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            collectives=self.collectives + other.collectives,
        )


def stratum_work(
    decoder: DecoderShape,
    axes: Axes,
    *,
    k: int,
    cells: int,
    ranks: int = 1,
    element_bytes: int = ELEMENT_BYTES,
) -> Work:
    """Forward and backward pass of one stratum on the rank that has most of it.

    Args:
        decoder: The decoder.
        axes: Its choices.
        k: The stratum, 0 to K - 1; under strata parallelism it is a rank's own.
        cells: B.
        ranks: Ranks of the model axis.
        element_bytes: Bytes per number.
    """
    s = WorkSizes(decoder=decoder, axes=axes, k=k, cells=cells, ranks=ranks, element=element_bytes)
    total = _sent(stratum_traffic(s), element_bytes)
    for part in parts(s).values():
        total += _work(part, element_bytes, forwards=1 + s.recomputed)
    return total + _spine_again(s)


def stratum_seconds(
    decoder: DecoderShape,
    axes: Axes,
    *,
    cells: int,
    ranks: int = 1,
    rates: Rates = CPU_CORE,
    element_bytes: int = ELEMENT_BYTES,
) -> tuple[float, ...]:
    """Seconds of every stratum's forward and backward pass; what strata parallelism balances.

    Args:
        decoder: The decoder.
        axes: Its choices.
        cells: B.
        ranks: Ranks of the model axis.
        rates: What a device reaches.
        element_bytes: Bytes per number.
    """
    strata = strata_of(WorkSizes, decoder, axes, ranks=ranks, cells=cells, element=element_bytes, rates=rates)
    computing = zip(*(strata.column(term, axes) for term in COMPUTING), strict=True)
    return tuple(sum(row) + sent for row, sent in zip(computing, strata.column(SENDING, axes), strict=True))


def step_seconds(
    decoder: DecoderShape,
    axes: Axes,
    mesh: MeshShape,
    *,
    cells: int,
    rates: Rates = CPU_CORE,
    element_bytes: int = ELEMENT_BYTES,
) -> float:
    """Seconds of a training step of the decoder on the slowest rank.

    Args:
        decoder: The decoder.
        axes: Its choices.
        mesh: Ranks per axis.
        cells: B, of one rank.
        rates: What a device reaches.
        element_bytes: Bytes per number.
    """
    costs = stratum_seconds(
        decoder, axes, cells=cells, ranks=mesh.model, rates=rates, element_bytes=element_bytes
    )
    if axes.placement == "strata":
        strata_of_rank = strata_of(
            WorkSizes, decoder, axes, ranks=mesh.model, cells=cells, element=element_bytes, rates=rates
        )
        passing = strata_of_rank.column(PASSING, axes)
        runs = pairwise((0, *deal(costs, mesh.model)))
        strata = max(sum(costs[start:end]) + sum(passing[:start]) for start, end in runs)
    else:
        strata = sum(costs)
    border = border_traffic(decoder, axes, cells=cells, ranks=mesh.model)
    return (
        strata
        + sum(c.seconds(mesh.model, rates.links, element_bytes=element_bytes) for c in border)
        + _gradient_seconds(decoder, axes, mesh, rates=rates, element_bytes=element_bytes)
    )


def _work(part: Part, element_bytes: int, *, forwards: int) -> Work:
    forward, backward = part
    return Work(
        flops=forwards * forward.flops + backward.flops,
        bytes=element_bytes * (forwards * forward.numbers + backward.numbers),
        kernels=forwards * forward.kernels + backward.kernels,
    )


def _sent(traffic: Traffic, element_bytes: int) -> Work:
    return Work(
        sent_bytes=element_bytes * sum(c.numbers for c in traffic), collectives=sum(c.calls for c in traffic)
    )


def _seconds(name: str, work: Work, rates: Rates) -> float:
    share = rates.attention_share if name == "attention" else 1.0
    products = work.flops / (share * rates.matmul_flops)
    return products + work.bytes / rates.memory_bytes + work.kernels * rates.overhead_seconds


def _spine_again(s: WorkSizes) -> Work:
    """Under stream a chained decoder's spine runs forward before its branches do, and again from the kept strata."""
    if not s.streamed:
        return Work()
    forward, backward = spine(s)
    return _work((forward, backward._replace(flops=0, numbers=0, kernels=0)), s.element, forwards=2)


def _part_seconds(name: str, s: WorkSizes) -> float:
    return _seconds(name, _work(PARTS[name].count(s), s.element, forwards=1 + s.recomputed), s.rates)


def _passing_seconds(s: WorkSizes) -> float:
    """What it takes a rank to pass a stratum without its branch, there and back."""
    return _seconds("spine", _work(spine(s), s.element, forwards=1), s.rates)


def _sending_seconds(s: WorkSizes) -> float:
    return sum(c.seconds(s.ranks, s.rates.links, element_bytes=s.element) for c in stratum_traffic(s))


COMPUTING: tuple[Term[WorkSizes, float], ...] = (
    *(
        Term(
            partial(_part_seconds, name),
            *dict.fromkeys((*term.reads, "activations")),
            of_features=term.of_features,
        )
        for name, term in PARTS.items()
    ),
    Term(
        lambda s: _seconds("spine", _spine_again(s), s.rates), "placement", "activations", of_features=False
    ),
)
PASSING = Term(_passing_seconds, "placement", of_features=False)
SENDING = Term(_sending_seconds, "placement", "features", "attention", "activations")


def _gradient_seconds(
    decoder: DecoderShape, axes: Axes, mesh: MeshShape, *, rates: Rates, element_bytes: int
) -> float:
    partial, whole = gradient_numbers(decoder, axes)
    groups = ((partial, mesh.data * mesh.model, 1), (whole, mesh.data, mesh.model))
    return sum(
        Collective(kind="all_reduce", numbers=numbers).seconds(
            ranks, rates.links, element_bytes=element_bytes, inner=inner
        )
        for numbers, ranks, inner in groups
        if numbers
    )
