"""Define a candidate region, with the bytes and cost from which `choose_chunks` chooses."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache

from lightning_amp.graph.peak import BlockBytes
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.chunk_bytes import Pieces, result_bytes
from lightning_amp.techniques.chunk.regions.region import Region, piece_length, pieces, written_over

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
        # cached by length: numbers of pieces with the same piece length take the same bytes
        self._lengths = _lengths(region.units)
        self._costs: dict[int, tuple[Region, float]] = {}
        self._plain, self.learns = plain, train and any(table.rows[i].needs_grad for i in self.outputs)

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
        longest = lengths[bisect_right(lengths, budget, lo=1, key=lambda n: self._peak(n, forward, backward)) - 1]
        n_chunks = len(pieces(self.region.units, -(-self.region.units // longest)))
        return n_chunks, self._peak(longest, forward, backward)

    def with_pieces(self, n_chunks: int) -> tuple[Region, float]:
        """Return the region in `n_chunks` pieces, and its cost."""
        if n_chunks not in self._costs:
            region = replace(self.region, n_chunks=n_chunks)
            self._costs[n_chunks] = region, self._cost(region)
        return self._costs[n_chunks]

    def _peak(self, length: int, forward: int, backward: int) -> int:
        """Return the peak with pieces of `length` units, in addition to the bytes given for either pass."""
        if length not in self._work:
            n_chunks = -(-self.region.units // length)
            there = self._pieces.once(n_chunks).peak_bytes + self._pieces.wide_bytes
            back = self._pieces.again(n_chunks).peak_bytes if self.learns else 0
            self._work[length] = there, back
        there, back = self._work[length]
        return max(forward + there, backward + back)

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
