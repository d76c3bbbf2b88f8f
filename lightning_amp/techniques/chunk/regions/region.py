"""Define `Region`, a run of operators that is computed piece by piece (in chunks) along one dim.

Legend: a row is an operator or argument of `graph/table.py`, given by its index; a region is the run [first, last] of
rows. There are three kinds of rows in a region:

    dims     cut: computed once per piece, and its result is a piece along the given dim
    sums     summed: computed once per piece, and the results of all pieces are added
    before   independent of the cut dim: computed once, whole, before the first piece, in order

An input of the region is a row that cut or summed rows read and that is itself neither: an argument, a row before the
run, or one of `before`. Inputs in `dims` are cut along that dim; every piece reads the others whole. An output is a cut
or summed row that is read after the region, or a result of the block. Outputs are allocated in full size and written
piece by piece. Other results of a piece are freed after their last reader in the piece.

All regions of find_regions.py are legal. The paper (AutoChunk, Section 3.3, Equations 4 to 7) requires
    flow traceability   a cut row's dim follows that of an argument, by its operator's rule
    unique setting      every row is cut along at most one dim, and is read either cut or whole
    output alignment    what is read after the region is cut, so that its pieces form the result, or summed
    basic               at least one row is cut, in at least two pieces
Also allowed, beyond the paper: sums over the cut dim; several outputs; inputs read whole; rows computed before.
Not allowed in a region: rows that change memory in place, or whose memory is changed later; random rows that are cut.

Cut dims differ in size if dims are merged or split. A piece is a whole number of `units`, the greatest common divisor
of the sizes; in a dim of size s, a unit is s / units entries.

In inference, a result may overwrite an argument that no later operator reads (`may_write`). That memory must be the
block's own, and its last reader, through any view, must be the writing row or an earlier one. Arguments, parameters and
results of the block are never overwritten.

An output of a region may overwrite an input: each computed piece is written into the bytes of the same piece of the
input. This is exact if the input is read cut, no other input of the region shares its memory (later pieces read it),
and the pieces of both occupy the same bytes: equally many side by side, of equal size.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from lightning_amp.graph.table import OPERATOR, OperatorRow, Table

GETITEM = "getitem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A run of rows, and how it is cut.

    Attributes:
        first: First row.
        last: Last row, inclusive.
        dims: Dim of every cut row of the run, and of every cut input.
        sums: Rows of the run whose results are added over the pieces.
        before: Rows of the run that are computed once, whole, before the first piece; also in `dims` if they are read
            cut.
        units: Units of every cut dim; a piece is a whole number of units.
        n_chunks: Number of pieces, at most `units`; `RegionSearch` sets the maximum.
        reach: Neighbouring units on either side of a piece that are computed with it because some rows read them
            (`OperatorRow.near`); their results are dropped.
    """

    first: int
    last: int
    dims: Mapping[int, int]
    sums: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    units: int
    n_chunks: int
    reach: int = 0

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Return (start, length) of every piece in units; all are equally long, only the last may be shorter."""
        return pieces(self.units, self.n_chunks)

    def inside(self, table: Table) -> tuple[int, ...]:
        """Return the rows that every piece computes, in order."""
        skipped = set(self.before)
        return tuple(i for i in range(self.first, self.last + 1) if table.rows[i].kind == OPERATOR and i not in skipped)

    def inputs(self, table: Table) -> tuple[int, ...]:
        """Return the rows that pieces read and do not compute, in order; those in `dims` are cut."""
        inside = set(self.inside(table))
        return tuple(sorted({k for i in inside for k in table.rows[i].inputs} - inside))

    def outputs(self, table: Table) -> tuple[int, ...]:
        """Return the rows whose full result is read after the region, in order."""
        return tuple(i for i in self.inside(table) if table.rows[i].last_use > self.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """Regions of one block that run in pieces, with predicted bytes and time.

    Attributes:
        regions: Regions in order; no two share a row.
        peak_bytes: Peak of the live bytes beyond the block's arguments and parameters, as counted by `chunk_bytes`.
        seconds: Predicted time of the block.
        whole_bytes: Peak without regions.
        whole_seconds: Predicted time without regions.
        thinned: Whether the block has too many regions to compare all of them.
        steps: Steps of the search for this plan: a measure of work that is the same on every machine.
    """

    regions: tuple[Region, ...] = field(default=())
    peak_bytes: int
    seconds: float
    whole_bytes: int
    whole_seconds: float
    thinned: bool = False
    steps: int = 0


def piece_length(units: int, n_chunks: int) -> int:
    """Return the units of every piece but the last."""
    return -(-units // n_chunks)


def piece_count(units: int, n_chunks: int) -> int:
    """Return the number of pieces; smaller than `n_chunks` if that many would leave one empty."""
    return -(-units // piece_length(units, n_chunks))


def pieces(units: int, n_chunks: int) -> tuple[tuple[int, int], ...]:
    """Return (start, length) of every piece; fewer than `n_chunks` if that many would leave one empty."""
    length = piece_length(units, n_chunks)
    return tuple((start, min(length, units - start)) for start in range(0, units, length))


def reach_of(rows: Sequence[OperatorRow], region: Region) -> int:
    """Return the units beside a piece that it needs: the largest sum of the rows' reach along any path."""
    reach: dict[int, int] = {}
    skipped = {*region.before, *region.sums}
    for i in sorted(region.dims):
        if region.first <= i <= region.last and i not in skipped:
            row, d, found = rows[i], region.dims[i], 0
            for k in row.inputs:
                if k in reach and reach[k] > found:
                    found = reach[k]
            for near, entries in row.near:
                if near == d:
                    found += -(-entries * region.units // row.shape[d])
            if found:
                reach[i] = found
    return max(reach.values(), default=0)


def written_from(table: Table) -> list[frozenset[int]]:
    """Return for every row the memory that this or a later row changes in place."""
    found: list[frozenset[int]] = []
    changed: frozenset[int] = frozenset()
    for row in reversed(table.rows):
        new = {table.rows[k].storage for k in row.writes}
        changed = changed | new if new else changed
        found.append(changed)
    return found[::-1]


def may_write(rows: Sequence[OperatorRow], i: int, k: int, read: Collection[int]) -> bool:
    """Return whether row i may be written into the memory of row k, while all rows in `read` are being read."""
    row, old = rows[i], rows[k]
    # `free` is 0 in training, where nothing is overwritten
    if not row.free or row.dtype != old.dtype or prod(row.shape) != prod(old.shape):
        return False
    alike = rows[old.storage].n_bytes == row.n_bytes
    others = {m for j in read if j != k for m in rows[j].memory}
    return alike and all(rows[m].free <= i for m in old.memory) and others.isdisjoint(old.memory)


def within(rows: Sequence[OperatorRow], row: OperatorRow, inside: Collection[int]) -> bool:
    """Return whether the rows `inside` make the memory that a row overwrites; an input's is read by later pieces."""
    return row.over >= 0 and set(rows[row.over].memory) <= set(inside)


def written_over(table: Table, region: Region) -> dict[int, int]:
    """Return the outputs of a region that overwrite an input, with that input."""
    rows, inputs = table.rows, region.inputs(table)
    found: dict[int, int] = {}
    if region.reach:  # the next piece reads what this one would write over
        return found
    for i in region.outputs(table):
        for k in inputs:
            if i in region.sums or k not in region.dims or k in found.values():
                continue
            # equally many pieces side by side occupy the same bytes
            of_piece = [prod(rows[j].shape[: region.dims[j]]) for j in (i, k)]
            if of_piece[0] == of_piece[1] and may_write(rows, i, k, inputs):
                found[i] = k
                break
    return found
