"""Map each index of a sharded dim to the rank that owns it, as interned run-length vectors.

A dim of n indices is sharded over R ranks by an owner vector: n ranks, one per index. A rank's shard has its indices in
ascending order. Views, slices, permutations and concatenations of a sharded tensor are then the same operation on the
local shard and on the owner vector. Uneven shards, attention heads inside a fused projection and flattened batches need
no special case.

The vector is stored as the runs of one period and a repeat count: if n is sharded in `[b, n]`, the owners of the
flattened dim b * n are those of n, repeated b times. Equal vectors are one object, so splits are compared by identity.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import groupby
from math import gcd
from typing import NamedTuple
from weakref import WeakValueDictionary


class OwnerRun(NamedTuple):
    """Consecutive indices of one rank."""

    length: int
    rank: int


@dataclass(frozen=True, eq=False)
class Owners:
    """Owner of each index of a dim; constructed by `of`, `contiguous`, `even` or `from_vector`.

    Attributes:
        runs: Runs of one period; adjacent runs have different ranks.
        repeat: Number of periods.
        size: Number of ranks of the mesh axis; some may own nothing.
    """

    runs: tuple[OwnerRun, ...]
    repeat: int
    size: int

    @staticmethod
    def of(runs: Iterable[OwnerRun], size: int, repeat: int = 1) -> "Owners":
        """Return the owners of runs that repeat `repeat` times."""
        period = _merged(runs)
        if len(period) <= 1:
            # one owner, or no indices
            period, repeat = tuple(OwnerRun(length * repeat, rank) for length, rank in period), 1
        # canonical form: the shortest period, however the vector was built
        times = _times_repeated(period)
        key = (_merged(_cut(period, 0, _length(period) // times)), repeat * times, size)
        return _INTERNED.setdefault(key, Owners(*key))

    @staticmethod
    def contiguous(sizes: Sequence[int]) -> "Owners":
        """Return owners where rank r owns the r-th range, of sizes[r] indices."""
        return Owners.of((OwnerRun(n, rank) for rank, n in enumerate(sizes)), len(sizes))

    @staticmethod
    def even(n: int, size: int) -> "Owners":
        """Return owners of contiguous ranges whose sizes differ by at most one."""
        return Owners.contiguous([n // size + (rank < n % size) for rank in range(size)])

    @staticmethod
    def from_vector(ranks: Iterable[int], size: int) -> "Owners":
        """Return the owners from one rank per index."""
        return Owners.of((OwnerRun(sum(1 for _ in same), rank) for rank, same in groupby(ranks)), size)

    # --- what is where ---

    @cached_property
    def period(self) -> int:
        """Number of indices in one period."""
        return _length(self.runs)

    @cached_property
    def n(self) -> int:
        """Number of all indices."""
        return self.period * self.repeat

    @cached_property
    def period_counts(self) -> tuple[int, ...]:
        """Number of indices of each rank in one period."""
        found = [0] * self.size
        for length, rank in self.runs:
            found[rank] += length
        return tuple(found)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of indices of each rank."""
        return tuple(n * self.repeat for n in self.period_counts)

    @cached_property
    def one_period(self) -> "Owners":
        """Owners of the indices of one period."""
        return Owners.of(self.runs, self.size)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Sizes of the shards if they are contiguous and in the order of the ranks; None otherwise."""
        ranks = [rank for _, rank in self.runs]
        return self.counts if self.repeat == 1 and ranks == sorted(set(ranks)) else None

    @cached_property
    def spans(self) -> tuple[tuple[range, ...], ...]:
        """Ranges of indices of each rank, in ascending order."""
        found: list[list[range]] = [[] for _ in range(self.size)]
        start = 0
        for length, rank in self.expanded():
            found[rank].append(range(start, start + length))
            start += length
        return tuple(map(tuple, found))

    def expanded(self) -> Iterator[OwnerRun]:
        """Yield the runs of all periods."""
        for _ in range(self.repeat):
            yield from self.runs

    # --- what a dim's owners become when the dim changes ---

    def repeated(self, times: int) -> "Owners":
        """Return the owners of `[times, n]` merged into one dim."""
        return Owners.of(self.runs, self.size, self.repeat * times)

    def widened(self, width: int) -> "Owners":
        """Return the owners of `[n, width]` merged into one dim."""
        return Owners.of((OwnerRun(n * width, rank) for n, rank in self.runs), self.size, self.repeat)

    def inner(self, times: int) -> "Owners | None":
        """Return the owners of the second dim of `[times, n / times]`; None if they also depend on the first dim."""
        # With one owner, the canonical form has no repeats (`of`), so its number of periods is not meaningful here.
        if len(self.runs) == 1:
            return Owners.of([OwnerRun(self.n // times, self.runs[0].rank)], self.size)
        return Owners.of(self.runs, self.size, self.repeat // times) if self.repeat % times == 0 else None

    def outer(self, width: int) -> "Owners | None":
        """Return the owners of the first dim of `[n / width, width]`; None if they also depend on the second dim."""
        runs, repeat = (self.runs, self.repeat)
        if self.period % width:
            # The first dim has one owner per group of `width` neighbours; a group may span two periods.
            runs, repeat = _merged(self.expanded()), 1
        if any(n % width for n, _ in runs):
            return None
        return Owners.of((OwnerRun(n // width, rank) for n, rank in runs), self.size, repeat)

    def take(self, indices: range) -> "Owners":
        """Return the owners of the indices of a range, whose step may be negative."""
        if indices.step < 0:
            forwards = self.take(indices[::-1])
            return Owners.of(forwards.runs[::-1], self.size, forwards.repeat)
        if indices == range(self.n):
            return self
        found, start = list[OwnerRun](), 0
        for length, rank in self.expanded():
            found.append(OwnerRun(len(_inside(indices, start, start + length)), rank))
            start += length
        return Owners.of(found, self.size)

    def local(self, rank: int, indices: range) -> list[range]:
        """Return a rank's local positions of the indices that it owns in a range, in the order of the range."""
        if indices.step < 0:
            return [own[::-1] for own in reversed(self.local(rank, indices[::-1]))]
        found, before = list[range](), 0
        for span in self.spans[rank]:
            own, shift = _inside(indices, span.start, span.stop), before - span.start
            found.append(range(own.start + shift, own.stop + shift, own.step))
            before += len(span)
        return joined(found)

    @staticmethod
    def joined(parts: Iterable["Owners"], size: int) -> "Owners":
        """Return the owners of a concatenation."""
        return Owners.of((run for part in parts for run in part.expanded()), size)

    def proportional(self, n: int) -> "Owners":
        """Return owners of n positions: each belongs to the rank that owns the corresponding index here."""
        ends, at, found, done = self.n, 0, list[OwnerRun](), 0
        for length, rank in self.expanded():
            at += length
            end = (at * n + ends // 2) // max(ends, 1)
            found.append(OwnerRun(end - done, rank))
            done = end
        return Owners.of(found, self.size)


# weak references: shapes that vary from step to step would fill it without limit
_INTERNED = WeakValueDictionary[tuple[tuple[OwnerRun, ...], int, int], Owners]()


def _length(runs: Iterable[OwnerRun]) -> int:
    return sum(length for length, _ in runs)


def _merged(runs: Iterable[OwnerRun]) -> tuple[OwnerRun, ...]:
    found: list[OwnerRun] = []
    for length, rank in runs:
        if not length:
            continue
        if found and found[-1].rank == rank:
            length += found.pop().length
        found.append(OwnerRun(length, rank))
    return tuple(found)


def _cut(runs: Iterable[OwnerRun], start: int, stop: int) -> Iterator[OwnerRun]:
    at = 0
    for length, rank in runs:
        yield OwnerRun(max(0, min(at + length, stop) - max(at, start)), rank)
        at += length


def _times_repeated(runs: tuple[OwnerRun, ...]) -> int:
    """Return how often the shortest period of merged runs repeats."""
    n, per_rank = _length(runs), dict[int, int]()
    for length, rank in runs:
        per_rank[rank] = per_rank.get(rank, 0) + length
    # every period has the same number of indices of each rank, and at least one border
    most = reduce(gcd, per_rank.values(), 0)
    # Try the largest count first, because the shortest period is canonical. A period has at least one run, which bounds
    # the count, and the same whole number of indices of each rank, so that the count divides the gcd of the ranks'
    # counts.
    for times in range(min(most, len(runs)), 1, -1):
        if most % times == 0 and _merged(tuple(_cut(runs, 0, n // times)) * times) == runs:
            return times
    return 1


def _inside(indices: range, start: int, stop: int) -> range:
    """Return the members of a range with a positive step that lie in [start, stop)."""
    # rounded up to the first member that is not before the start
    first = max(0, -(-(start - indices.start) // indices.step))
    last = max(first, -(-(min(stop, indices.stop) - indices.start) // indices.step))
    return indices[first:last]


def joined(ranges: Iterable[range]) -> list[range]:
    """Merge adjacent ranges, and drop empty ones."""
    found: list[range] = []
    for one in ranges:
        last = found[-1] if found else None
        if last and one and one.step == last.step and one.start == last[-1] + last.step:
            found[-1] = range(last.start, one.stop, one.step)
        elif one:
            found.append(one)
    return found
