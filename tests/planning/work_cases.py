"""A decoder's sizes, and what the cost model counts of a step with them; no torch."""

from collections import Counter
from itertools import chain
from typing import Any, NamedTuple

from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.sizes import RankSizes
from lightning_amp.planning.time.collectives import gradient_numbers, region_traffic, stratum_traffic
from lightning_amp.planning.time.operator_costs import parts, there_and_back

CELLS = 6


def shape(**changes: Any) -> DecoderShape:
    sizes = {"anchors": 192, "dim": 16, "window": 32, "strata": 3, "attention": True} | changes
    strata = sizes.pop("strata")
    features = sizes.pop("features", tuple(sizes["anchors"] - k for k in range(strata)))
    return DecoderShape(fqn="decoder", features=features, distances=tuple(range(len(features))), **sizes)


class Work(NamedTuple):
    """What a rank does: operations of products, bytes and calls of operators, bytes and calls of collectives."""

    flops: float
    bytes: float
    kernels: float
    sent_bytes: float
    collectives: int


def stratum_work(sizes: DecoderShape, axes: Axes, *, k: int, cells: int, ranks: int = 1) -> Work:
    s = RankSizes(decoder=sizes, axes=axes, k=k, cells=cells, ranks=ranks)
    done = [there_and_back(part, forwards=1 + s.recomputed) for part in parts(s).values()]
    flops, numbers, kernels = map(sum, zip(*done, strict=True))
    traffic = stratum_traffic(s)
    calls = sum(c.calls for c in traffic)
    return Work(flops, 4 * numbers, kernels, 4 * sum(c.numbers for c in traffic), calls)


def work(sizes: DecoderShape, axes: Axes, *, ranks: int = 1) -> Work:
    strata = [stratum_work(sizes, axes, k=k, cells=CELLS, ranks=ranks) for k in range(len(sizes.features))]
    return Work(*map(sum, zip(*strata, strict=True)))


def sent(sizes: DecoderShape, axes: Axes, ranks: int) -> Counter[str]:
    """Bytes that the model hands to collectives, by kind."""
    found: Counter[str] = Counter()
    strata = [RankSizes(decoder=sizes, axes=axes, k=k, cells=CELLS, ranks=ranks) for k in range(len(sizes.features))]
    for collective in chain(*map(stratum_traffic, strata), region_traffic(sizes, axes, cells=CELLS, ranks=ranks)):
        found[collective.kind] += 4 * int(collective.numbers)
    found["all_reduce"] += 4 * gradient_numbers(sizes, axes)[0]
    return found
