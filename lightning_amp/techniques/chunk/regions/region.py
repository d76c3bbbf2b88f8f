"""Define `Region`, a run of operators computed piece by piece along one dim.

Legend: a row is an operator or argument of `graph/table.py`, named by its index; a region is the run [first, last] of
rows. Rows of the run are of three kinds:

    dims     cut: computed once per piece, its result a piece along the named dim
    sums     summed: computed once per piece, the results of all pieces added up
    before   not reached by the flow of the cut dim: computed once, whole, before the first piece, in their order

An input of the region is a row that cut or summed rows read and that is neither cut nor summed: an argument, a row
before the run, or one of `before`. Inputs in `dims` are cut along that dim, all others are read whole by every piece.
An output is a cut or summed row that something after the region reads, the block's results included. Outputs are
written into memory of their whole size, piece by piece; what else a piece makes lives until its last reader within
the piece.

Legal is a region (find_regions.py finds no other; the paper is AutoChunk, Section 3.3, Equations 4 to 7)
    flow traceability   a cut row's dim follows that of an argument, by its operator's rule
    unique setting      every row is cut along one dim at most, and read either cut or whole
    output alignment    whatever is read later is cut, so that its pieces are the pieces of the result, or summed up
    basic               something is cut, in two pieces or more
and, beyond the paper: sums over the cut dim by +; several outputs; inputs read whole; rows computed before.
Never in a region: rows that change memory in place, or whose memory is changed later; random rows that are cut.

The sizes of cut dims differ where dims are merged or split: a piece is a whole number of `units`, their greatest common
divisor, and of a dim of size s the unit is s / units entries.

In inference a result may be written over an argument that no later operator reads: `may_write` says when. The memory
is the block's own, and its last reader, by any view of it, is the row that writes or comes before that. An argument, a
parameter or a result of the block is never written over.

A region's output may take that of an input: a piece of it is written when it has been computed, into the bytes of the
same piece of the input. That changes nothing where the input is read cut, no other input of the region may lie in its
memory (later pieces read it), and piece and piece are the same bytes: as many pieces side by side, as large.
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
        first: OperatorRow.
        last: OperatorRow, which belongs to the region.
        dims: Of every row of the run that is cut, and of every input that is cut: the dim.
        sums: Rows of the run whose results are added up over the pieces.
        before: Rows of the run that are computed once, whole, before the first piece; in `dims` too where they are cut
            when read.
        units: Of which every piece is a whole number; in every cut dim.
        n_chunks: Pieces, no more than units; `RegionSearch` sets the most.
        reach: Units on either side of a piece that are computed with it, because some rows need them (`Row.near`); what
            they give is dropped.
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
        """(start, length) of every piece in units: all as long as the first but the last, which may be shorter."""
        return pieces(self.units, self.n_chunks)

    def inside(self, table: Table) -> tuple[int, ...]:
        """Rows that every piece computes, in their order."""
        skipped = set(self.before)
        return tuple(i for i in range(self.first, self.last + 1) if table.rows[i].kind == OPERATOR and i not in skipped)

    def inputs(self, table: Table) -> tuple[int, ...]:
        """Rows that pieces read and do not compute, in their order; those in `dims` are cut."""
        inside = set(self.inside(table))
        return tuple(sorted({k for i in inside for k in table.rows[i].inputs} - inside))

    def outputs(self, table: Table) -> tuple[int, ...]:
        """Rows of which the region hands on the whole result, in their order."""
        return tuple(i for i in self.inside(table) if table.rows[i].last_use > self.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """What is cut in one block.

    Attributes:
        regions: In their order; no two share a row.
        peak_bytes: Most bytes alive beyond the block's arguments and parameters, as `chunk_bytes` counts them.
        seconds: Predicted, of all that the block computes.
        whole_bytes: Peak without any region.
        whole_seconds: Predicted without any region.
        thinned: Whether the block has too many regions to compare all of them.
    """

    regions: tuple[Region, ...] = field(default=())
    peak_bytes: int
    seconds: float
    whole_bytes: int
    whole_seconds: float
    thinned: bool = False


def piece_length(units: int, n_chunks: int) -> int:
    """Units of every piece but the last."""
    return -(-units // n_chunks)


def pieces(units: int, n_chunks: int) -> tuple[tuple[int, int], ...]:
    """(start, length) of every piece; no more than `n_chunks`, fewer where that many would leave one empty."""
    length = piece_length(units, n_chunks)
    return tuple((start, min(length, units - start)) for start in range(0, units, length))


def reach_of(rows: Sequence[OperatorRow], region: Region) -> int:
    """Units besides a piece that a region needs: those of its rows added up along the longest way through it."""
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
    """For every row, the memory that it or a later row changes in place."""
    found: list[frozenset[int]] = []
    changed: frozenset[int] = frozenset()
    for row in reversed(table.rows):
        new = {table.rows[k].storage for k in row.writes}
        changed = changed | new if new else changed
        found.append(changed)
    return found[::-1]


def may_write(rows: Sequence[OperatorRow], i: int, k: int, read: Collection[int]) -> bool:
    """Whether row i may be written into the memory of row k, where all of the rows `read` are read meanwhile."""
    row, old = rows[i], rows[k]
    if not row.free or row.dtype != old.dtype or prod(row.shape) != prod(old.shape):
        return False
    alike = rows[old.storage].n_bytes == row.n_bytes
    others = {m for j in read if j != k for m in rows[j].memory}
    return alike and all(rows[m].free <= i for m in old.memory) and others.isdisjoint(old.memory)


def within(rows: Sequence[OperatorRow], row: OperatorRow, inside: Collection[int]) -> bool:
    """Whether what a row is written over is made by the rows `inside`: pieces of an input are read by other pieces."""
    return row.over >= 0 and set(rows[row.over].memory) <= set(inside)


def written_over(table: Table, region: Region) -> dict[int, int]:
    """Outputs of a region with the inputs in whose memory they are written."""
    rows, inputs = table.rows, region.inputs(table)
    found: dict[int, int] = {}
    if region.reach:  # the next piece reads what this one would write over
        return found
    for i in region.outputs(table):
        for k in inputs:
            if i in region.sums or k not in region.dims or k in found.values():
                continue
            beside = [prod(rows[j].shape[: region.dims[j]]) for j in (i, k)]
            if beside[0] == beside[1] and may_write(rows, i, k, inputs):
                found[i] = k
                break
    return found
