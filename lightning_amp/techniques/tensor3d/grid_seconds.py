"""Predict seconds, bytes and peak of a step on grids of ranks, from dry runs of it.

A grid has axes x and y, whose ranks share a batch, z, whose ranks have other rows and parts of parameters, and copies
("data"), which average gradients. Groups nest in this order, x innermost, which decides the bandwidth of each
(link_seconds.py). A layout that was planned for (x, y) serves the grid (y, x) too, with the axes' names exchanged.

One dry run for each pair (x, y) is enough, for z and the copies change what follows from its list:

    all-gather over z        a rank contributes n / z
    reduce-scatter over z    a rank puts in n, whatever z is
    all-reduce over copies   of n / z
    what a rank holds        parameters, gradients and optimiser state are n / z

Seconds are those of one step, nothing hidden behind computation; grids are compared by the seconds of a batch of the
loader, of which a step takes one for each rank of z and each copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from lightning_amp.costs.device_rates import Kind, Links, collective_seconds
from lightning_amp.footprint.module_profile import HELD, ModuleProfile

ORDER = ("x", "y", "z", "data")
"""Axes of a grid, the innermost first."""
SizesOf = Mapping[str, int]


class Message(NamedTuple):
    """One collective of a rank, with the bytes that it passes in."""

    kind: Kind
    n_bytes: float
    axis: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """What one rank of a grid does in a step: seconds of its own computation, what it sends, its bytes."""

    sizes: SizesOf
    seconds: float
    messages: tuple[Message, ...]
    profile: ModuleProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class GridCost:
    """A grid, and what a step on it is predicted to take.

    Attributes:
        sizes: Ranks of x, y and z.
        copies: Of the grid.
        exchanged: Whether its layout was planned for (y, x).
        sent_bytes: What a rank passes in to collectives.
        seconds: Of a step.
    """

    sizes: tuple[int, int, int]
    copies: int
    exchanged: bool
    peak_bytes: int
    sent_bytes: float
    seconds: float

    @property
    def batch_seconds(self) -> float:
        """Seconds of a batch of the loader."""
        return self.seconds / (self.sizes[2] * self.copies)

    @property
    def roles(self) -> tuple[int, int]:
        """The pair (x, y) that its layout was planned for."""
        x, y, _ = self.sizes
        return (y, x) if self.exchanged else (x, y)


def factorings(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """All grids (x, y, z, copies) of so many ranks."""
    for x in divisors(ranks):
        for y in divisors(ranks // x):
            for z in divisors(ranks // (x * y)):
                yield x, y, z, ranks // (x * y * z)


def divisors(n: int) -> list[int]:
    """Whole numbers that divide a number."""
    return [d for d in range(1, n + 1) if n % d == 0]


def one_bandwidth(links: Links) -> Links:
    """The placement-agnostic model: any two ranks have the same bandwidth."""
    return replace(links, inter_bandwidth=links.intra_bandwidth, adapters=1, ranks_per_node=2**31)


def sent_seconds(messages: Iterable[Message], sizes: SizesOf, links: Links, *, order: Sequence[str] = ORDER) -> float:
    """Seconds of one rank's collectives one after the other.

    Links are those of `one_bandwidth` where places are to make no difference. `order`: the innermost axis first; others
    are innermost.
    """
    inner = {axis: prod(sizes.get(own, 1) for own in order[:i]) for i, axis in enumerate(order)}
    return sum(
        collective_seconds(m.kind, m.n_bytes, sizes[m.axis], links, inner=inner.get(m.axis, 1)) for m in messages
    )


def grid_cost(run: DryRun, z: int, copies: int, links: Links, *, exchanged: bool = False) -> GridCost:
    """What a step takes on the grid (x, y, z) of a dry run's x and y, or on (y, x, z) where they are exchanged."""
    x, y = run.sizes["x"], run.sizes["y"]
    sizes = {"x": x, "y": y, "z": z, "data": copies}
    order = ("y", "x", *ORDER[2:]) if exchanged else ORDER
    share, parts = run.sizes["z"] / z, (("z", "all_gather"), ("data", "all_reduce"))
    messages = [
        m._replace(n_bytes=m.n_bytes * share) if (m.axis, m.kind) in parts else m
        for m in run.messages
        if m.axis not in ("z", "data") or sizes[m.axis] > 1
    ]
    moments = [moment.by_kind.items() for moment in run.profile.timeline]
    peak = max(sum(n * (share if kind in HELD else 1) for kind, n in by_kind) for by_kind in moments)
    return GridCost(
        sizes=(y, x, z) if exchanged else (x, y, z),
        copies=copies,
        exchanged=exchanged,
        peak_bytes=round(peak) + max(0, run.profile.first_bytes - run.profile.peak_bytes),
        sent_bytes=sum(m.n_bytes for m in messages),
        seconds=run.seconds + sent_seconds(messages, sizes, links, order=order),
    )


def ranked(costs: Iterable[GridCost], budget: int | None) -> list[GridCost]:
    """The fastest first of those that fit, then the others, that of the least peak first."""

    def order(cost: GridCost) -> tuple[object, ...]:
        fits = budget is None or cost.peak_bytes <= budget
        by = cost.batch_seconds if fits else cost.peak_bytes
        return not fits, by, cost.sent_bytes, cost.exchanged, cost.sizes

    return sorted(costs, key=order)
