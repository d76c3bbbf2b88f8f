"""Predict seconds, bytes and peak of a step on grids of ranks, from dry runs of the step.

A grid has the axes x and y, whose ranks share a batch, z, whose ranks have other rows and shards of parameters, and
copies ("data"), which average gradients. Groups nest in this order, x innermost, which determines the bandwidth of each
(link_seconds.py). A layout that was planned for (x, y) also serves the grid (y, x), with the axes exchanged.

One dry run for each pair (x, y) is enough, because z and the copies only scale its messages and bytes:

    all-gather over z        a rank contributes n / z
    reduce-scatter over z    a rank contributes n, for any z
    all-reduce over copies   n / z
    bytes held by a rank     parameters, gradients and optimiser state are n / z

Seconds are those of one step, without overlap of communication and computation. Grids are compared by the seconds per
batch of the loader: a step consumes one batch for each rank of z and each copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from lightning_amp.costs.device_rates import Kind, Links, collective_seconds
from lightning_amp.footprint.module_profile import HELD, ModuleProfile

ORDER = ("x", "y", "z", "data")
"""Axes of a grid, from the innermost to the outermost."""
SizesOf = Mapping[str, int]


class Message(NamedTuple):
    """One collective of a rank, with the bytes that the rank contributes."""

    kind: Kind
    n_bytes: float
    axis: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """Step of one rank of a grid: seconds of its computation, its collectives, its memory profile."""

    sizes: SizesOf
    seconds: float
    messages: tuple[Message, ...]
    profile: ModuleProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class GridCost:
    """Predicted cost of a step on a grid.

    Attributes:
        sizes: Ranks of x, y and z.
        copies: Number of copies of the grid.
        exchanged: Whether its layout was planned for (y, x).
        peak_bytes: Peak of the rank.
        sent_bytes: Bytes that a rank contributes to collectives.
        seconds: Seconds of a step.
    """

    sizes: tuple[int, int, int]
    copies: int
    exchanged: bool
    peak_bytes: int
    sent_bytes: float
    seconds: float

    @property
    def batch_seconds(self) -> float:
        """Seconds per batch of the loader."""
        return self.seconds / (self.sizes[2] * self.copies)

    @property
    def roles(self) -> tuple[int, int]:
        """The pair (x, y) for which its layout was planned."""
        x, y, _ = self.sizes
        return (y, x) if self.exchanged else (x, y)


def factorings(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """All grids (x, y, z, copies) with this number of ranks."""
    for x in divisors(ranks):
        for y in divisors(ranks // x):
            for z in divisors(ranks // (x * y)):
                yield x, y, z, ranks // (x * y * z)


def divisors(n: int) -> list[int]:
    """Divisors of a number, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def one_bandwidth(links: Links) -> Links:
    """Return links in which any two ranks have the same bandwidth, independent of their placement."""
    return replace(links, inter_bandwidth=links.intra_bandwidth, adapters=1, ranks_per_node=2**31)


def sent_seconds(messages: Iterable[Message], sizes: SizesOf, links: Links, *, order: Sequence[str] = ORDER) -> float:
    """Seconds of one rank's collectives, one after the other.

    `order` lists the axes from the innermost to the outermost; other axes count as innermost. With links from
    `one_bandwidth`, placement makes no difference.
    """
    inner = {axis: prod(sizes.get(own, 1) for own in order[:i]) for i, axis in enumerate(order)}
    return sum(
        collective_seconds(m.kind, m.n_bytes, sizes[m.axis], links, inner=inner.get(m.axis, 1)) for m in messages
    )


def grid_cost(run: DryRun, z: int, copies: int, links: Links, *, exchanged: bool = False) -> GridCost:
    """Predict a step on the grid (x, y, z), with x and y of a dry run, or on (y, x, z) if they are exchanged."""
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
    """Sort costs: those that fit by seconds, then the others by their peak."""

    def order(cost: GridCost) -> tuple[object, ...]:
        fits = budget is None or cost.peak_bytes <= budget
        by = cost.batch_seconds if fits else cost.peak_bytes
        return not fits, by, cost.sent_bytes, cost.exchanged, cost.sizes

    return sorted(costs, key=order)
