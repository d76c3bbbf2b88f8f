"""Define `Region`, a run of operators computed piece by piece along one dim, and check that results stay the same.

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

Legal is a region (`problem` says why one is not; the paper is AutoChunk, Section 3.3, Equations 4 to 7)
    flow traceability   a cut row's dim follows that of an argument, by its operator's rule
    unique setting      every row is cut along one dim at most, and read either cut or whole
    output alignment    whatever is read later is cut, so that its pieces are the pieces of the result, or summed up
    basic               something is cut, in two pieces or more
and, beyond the paper: sums over the cut dim by +; several outputs; inputs read whole; rows computed before.
Never in a region: rows that change memory in place, or whose memory is changed later; random rows that are cut.

The sizes of cut dims differ where dims are merged or split: a piece is a whole number of `units`, their greatest common
divisor, and of a dim of size s the unit is s / units entries.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from lightning_amp.errors import PlanError
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
        n_chunks: Pieces, no more than units; `find_regions` sets the most.
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


def check_region(table: Table, region: Region) -> None:
    """Refuse a region that would change what the block computes.

    Raises:
        PlanError: Why it is not legal.
    """
    found = problem(table, region)
    if found:
        raise PlanError(
            f"rows {region.first!r} to {region.last!r} of {table.block!r} were to be computed in {region.n_chunks!r}"
            f" pieces: {found}; take a region of find_regions"
        )


def problem(table: Table, region: Region) -> str:
    """Why a region is not legal, in words; "" if it is."""
    return next(_problems(table, region), "")


def _problems(table: Table, region: Region) -> Iterator[str]:
    rows = table.rows
    if not 0 <= region.first <= region.last < len(rows):
        yield f"the block has rows 0 to {len(rows) - 1}"
        return
    yield from _kinds(table, region)
    own = set(region.inside(table))
    for i in region.before:
        read = own.intersection(rows[i].inputs)
        if read:
            yield f"{_name(rows, i)} must be computed before the pieces and reads {_name(rows, min(read))}"
    for i in sorted(own):
        yield from _row(table, region, i, own)
    yield from _reads(table, region, own)
    yield from _memory(table, region)
    yield from _sizes(table, region)


def _kinds(table: Table, region: Region) -> Iterator[str]:
    """Every operator is cut, summed or before, and nothing else is."""
    inside = range(region.first, region.last + 1)
    before, sums = set(region.before), set(region.sums)
    run = {i for i in inside if table.rows[i].kind == OPERATOR}
    alien = (before | sums) - run
    if alien:
        yield f"{_name(table.rows, min(alien))} is no operator of the run"
    for i in sorted(run):
        kinds = (i in before) + (i in sums) + (i in region.dims and i not in before)
        if kinds != 1:
            yield f"{_name(table.rows, i)} must be one of cut, summed and before"
    if not run - before:
        yield "nothing is cut"


def _row(table: Table, region: Region, i: int, own: set[int]) -> Iterator[str]:
    """One row that pieces compute: its dim or sum follows its arguments, and these are read as they are cut."""
    rows, row = table.rows, table.rows[i]
    if row.random:
        yield f"{_name(rows, i)} draws random numbers, which pieces would draw otherwise"
    if i in region.sums:
        fitting = [g for g in row.sums if _matches(row, dict(g), g, region.dims, own)]
        if not fitting:
            yield f"{_name(rows, i)} does not sum over what is cut"
        return
    d = region.dims[i]
    if row.dims is None or not 0 <= d < len(row.dims):
        yield f"{_name(rows, i)} has no rule for dim {d}"
    elif not row.dims[d]:
        yield f"dim {d} of {_name(rows, i)} follows none of its arguments"
    elif not _matches(row, dict(row.dims[d]), row.dims[d], region.dims, own):
        yield f"dim {d} of {_name(rows, i)} does not follow what is cut of its arguments"


def _matches(
    row: OperatorRow, asked: dict[int, int], pairs: Iterable[tuple[int, int]], dims: Mapping[int, int], own: set[int]
) -> bool:
    """Whether every argument is cut along the dim that is asked of it, and the others are whole inputs."""
    if any(asked[k] != d for k, d in pairs):
        return False
    return all(
        dims.get(j) == asked[k] if k in asked else j not in dims and j not in own for k, j in enumerate(row.inputs)
    )


def _reads(table: Table, region: Region, own: set[int]) -> Iterator[str]:
    """Results of several tensors neither enter cut nor leave, and nothing is computed or cut in vain."""
    rows = table.rows
    for i, row in enumerate(rows):
        for j in row.inputs if row.op == GETITEM else ():
            if i in own and j not in own and j in region.dims:
                yield f"{_name(rows, j)} has several results and cannot be cut"
            if i not in own and j in own:
                yield f"{_name(rows, j)} has several results and cannot be put together"
    if not region.outputs(table):
        yield "nothing that it computes is read later"
    useless = set(region.dims) - own - {k for i in own for k in rows[i].inputs}
    if useless:
        yield f"{_name(rows, min(useless))} is cut and not read"


def _memory(table: Table, region: Region) -> Iterator[str]:
    """No memory that the region makes or reads is changed in it or later."""
    rows = table.rows
    changed = written_from(table)[region.first]
    for i in range(region.first, region.last + 1):
        if rows[i].writes:
            yield f"{_name(rows, i)} changes memory in place"
        used = {rows[k].storage for k in (i, *rows[i].inputs)} & changed
        if rows[i].kind == OPERATOR and used:
            yield f"the memory of {_name(rows, min(used))} is changed in place"


def _sizes(table: Table, region: Region) -> Iterator[str]:
    found = 0
    for i, d in region.dims.items():
        if not 0 <= d < len(table.rows[i].shape):
            yield f"{_name(table.rows, i)} has no dim {d}"
            return
        found = gcd(found, table.rows[i].shape[d])
    if found != region.units or found < 2:
        yield f"the sizes of its cut dims are in {found} units, at least 2, and not in {region.units}"
    needed = reach_of(table.rows, region) if found == region.units else 0
    if region.reach != needed or (needed and region.sums):
        yield (f"its rows need {needed} units in addition to a piece, not {region.reach}, and then no row may be a sum")
    if not 2 <= region.n_chunks <= max(found, 2):
        yield f"{region.n_chunks} pieces of {found} units"


def written_from(table: Table) -> list[frozenset[int]]:
    """For every row, the memory that it or a later row changes in place."""
    found: list[frozenset[int]] = []
    changed: frozenset[int] = frozenset()
    for row in reversed(table.rows):
        new = {table.rows[k].storage for k in row.writes}
        changed = changed | new if new else changed
        found.append(changed)
    return found[::-1]


def _name(rows: tuple[OperatorRow, ...], i: int) -> str:
    return f"row {i} ({rows[i].name!r}, {rows[i].op or rows[i].kind!r})"
