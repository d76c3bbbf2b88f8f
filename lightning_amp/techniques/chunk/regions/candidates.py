"""Define a candidate region, with the bytes and cost from which `choose_chunks` chooses."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache

from lightning_amp.graph.peak import BlockBytes
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.chunk_bytes import Pieces, result_bytes
from lightning_amp.techniques.chunk.regions.region import Region, piece_count, piece_length, written_over

Cost = Callable[[Region], float]
STEP = 1.15
"""Ratio of two piece lengths that are tried."""


class RegionCandidate:
    """A region, and its bytes and cost in any number of pieces.

    Attributes:
        region: The region, in the most pieces.
        outputs: Rows that are read after the region.
        output_bytes: Size of their results.
        learns: Whether it has a backward pass.
    """

    def __init__(self, table: Table, region: Region, cost: Cost, plain: BlockBytes, *, train: bool) -> None:
        self.region, self.outputs = region, region.outputs(table)
        self.output_bytes = sum(result_bytes(table.rows[i]) for i in self.outputs)
        self._table, self._cost = table, cost
        self._work: dict[int, tuple[int, int]] = {}
        self._rows: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        # cached by length: numbers of pieces with the same piece length take the same bytes
        self._lengths = _lengths(region.units)
        self._costs: dict[int, tuple[Region, float]] = {}
        self._plain, self.learns = plain, train and any(table.rows[i].needs_grad for i in self.outputs)
        self._train = train

    @cached_property
    def least_cost(self) -> float:
        """Lower bound of the cost over all numbers of pieces: the cost of two."""
        return self.with_pieces(min(2, self.region.units))[1]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Rows that the region reads."""
        return self.region.inputs(self._table)

    @cached_property
    def gradient_bytes(self) -> int:
        """Pending gradients, and gradients of the inputs, while the backward pass of the region runs."""
        if not self.learns:
            return 0
        read = (self._table.rows[i] for i in self.inputs)
        return self._plain.waiting[self.region.last] + sum(result_bytes(row) for row in read if row.needs_grad)

    @cached_property
    def before(self) -> list[tuple[int, list[int]]]:
        """Rows computed before the pieces, each with the rows that are still to be read after it."""
        rows, region, found = self._table.rows, self.region, list[tuple[int, list[int]]]()
        there = [k for k in range(region.first) if rows[k].kind == OPERATOR]
        for n, i in enumerate(region.before):
            there.append(i)
            later = {*self.inputs, *(k for j in region.before[n + 1 :] for k in rows[j].inputs)}
            found.append((i, [k for k in there if k in later or rows[k].last_use > region.last]))
        return found

    @cached_property
    def over(self) -> dict[int, int]:
        """Outputs that overwrite an input, with that input."""
        return written_over(self._table, self.region)

    def cut(self, budget: int | None, forward: int, backward: int) -> tuple[int, int] | None:
        """Return the fewest pieces (the most without a budget) that fit with the given bytes, and the peak; or None."""
        lengths = self._lengths
        if budget is None:
            return self.region.units, self._peak(1, forward, backward)
        if max(forward, backward) > budget or self._peak(1, forward, backward) > budget:
            return None
        # bisect is valid because bytes grow with the length of a piece
        if self._train:
            there, back = self._by_length
            place = min(bisect_right(there, budget - forward), bisect_right(back, budget - backward)) - 1
        else:
            place = bisect_right(lengths, budget, lo=1, key=lambda n: self._peak(n, forward, backward)) - 1
        return self._numbers[place], self._peak(lengths[place], forward, backward)

    @cached_property
    def _numbers(self) -> list[int]:
        """Number of pieces of each length."""
        units = self.region.units
        return [piece_count(units, -(-units // n)) for n in self._lengths]

    @cached_property
    def _by_length(self) -> tuple[list[int], list[int]]:
        """Bytes of a piece of each length, in either pass."""
        for length in self._lengths:
            self._peak(length, 0, 0)
        there, back = zip(*map(self._work.__getitem__, self._lengths), strict=True)
        return list(there), list(back)

    def with_pieces(self, n_chunks: int) -> tuple[Region, float]:
        """Return the region in `n_chunks` pieces, and its cost."""
        if n_chunks not in self._costs:
            region = replace(self.region, n_chunks=n_chunks)
            self._costs[n_chunks] = region, self._cost(region)
        return self._costs[n_chunks]

    def _peak(self, length: int, forward: int, backward: int) -> int:
        """Return the peak with pieces of `length` units, in addition to the bytes given for either pass."""
        if length not in self._work:
            ends = self._lengths[0], self._lengths[-1]
            # in training the choice is counted again, and bytes between the ends may be slightly too high here
            count = self._between if self._train and length not in ends else self._counted
            self._work[length] = count(length)
        there, back = self._work[length]
        return max(forward + there, backward + back)

    def _counted(self, length: int) -> tuple[int, int]:
        """Count one piece, in the forward pass, and when it is computed again with its backward pass."""
        n_chunks = -(-self.region.units // length)
        once = self._pieces.once(n_chunks)
        again = self._pieces.again(n_chunks) if self.learns else None
        self._rows[length] = once.forward, (*again.forward, *again.backward) if again else ()
        return once.peak_bytes + self._pieces.wide_bytes, again.peak_bytes if again else 0

    def _between(self, length: int) -> tuple[int, int]:
        """Return the bytes of a piece by lines between the shortest and the longest one, for every row."""
        share, whole = self._of(length) - self._of(self._lengths[0]), self._of(self._lengths[-1])
        whole -= self._of(self._lengths[0])
        there, back = (max((-(-(b - a) * share // whole) + a for a, b in lines), default=0) for lines in self._lines)
        return there + self._pieces.wide_bytes, back

    def _of(self, length: int) -> int:
        """Return the units that a piece of `length` computes, with its neighbours."""
        units = self.region.units
        return min(piece_length(units, -(-units // length)) + 2 * self.region.reach, units)

    @cached_property
    def _lines(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Bytes of the rows of the shortest and the longest piece, of either pass, without rows that are never most."""
        ends = self._lengths[0], self._lengths[-1]
        for length in ends:
            if length not in self._rows:
                self._work[length] = self._counted(length)
        shortest, longest = (self._rows[length] for length in ends)
        found = []
        for pairs in (zip(a, b, strict=True) for a, b in zip(shortest, longest, strict=True)):
            most, lines = -1, list[tuple[int, int]]()
            for line in sorted(pairs, reverse=True):
                if line[1] > most:
                    most = line[1]
                    lines.append(line)
            found.append(lines)
        return found[0], found[1]

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._table, self.region)


@lru_cache
def _lengths(units: int) -> tuple[int, ...]:
    """Return the piece lengths to try: all up to a few units, then in ratios of STEP."""
    found = [1]
    while found[-1] < piece_length(units, 2):
        found.append(max(found[-1] + 1, int(found[-1] * STEP)))
    return (*found[:-1], piece_length(units, 2)) if units > 2 else (1,)
