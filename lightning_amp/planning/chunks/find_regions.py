"""Every run of operators that can be computed piece by piece, found from its last row upwards.

For a last row and a dim of it (or a sum that it is), rows are passed in reverse order. A row that a cut row reads
cut is cut itself, if its own dim follows its arguments' and if whoever else reads it inside the run can be cut along
with it; otherwise it is computed before the pieces. Whenever a row is cut, the run from it to the last row is a region.
So one walk per (last row, dim) finds the regions of all first rows, where the paper's Algorithm 1 searches every pair
of a first and a last row anew: O(rows^2) steps instead of O(rows^3).

Of the legal regions with the same first and last row, those in which more rows are cut are found: a row that could be
cut and is computed before the pieces instead costs memory and saves nothing. Where two rows cannot both be cut, the
later one is.

The paper's two ways to search less are `around` (only regions that contain one of these rows, such as those near the
peak) and `window` (the most rows of a region). Beyond them, `held` leaves out regions of which a shorter one does the
same.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import gcd, inf

from lightning_amp.graph.table import OPERATOR, Row, Table
from lightning_amp.planning.chunks.region import GETITEM, Region, reach_of, written_from


def find_regions(
    table: Table,
    *,
    around: Collection[int] | None = None,
    window: int | None = None,
    held: Sequence[int] | None = None,
) -> tuple[Region, ...]:
    """Legal regions by last row, dim and first row, each in the most pieces.

    Args:
        table: A captured block.
        around: Rows of which a region has at least one; None for any.
        window: Most rows of a region; None for any.
        held: Bytes alive just before every row. With it regions are left out that begin or end with a view, and those
            that begin earlier than another though no fewer bytes are alive there and they have no further row of
            `around`.
    """
    search = RegionSearch(table, window=window, held=held)
    return tuple(search.around(range(len(table.rows)) if around is None else around))


class RegionSearch:
    """Which walks there are, and which of their regions count; a region that is found again is the same object.

    Args:
        table: A captured block.
        window: As in `find_regions`.
        held: As in `find_regions`.
    """

    def __init__(self, table: Table, *, window: int | None = None, held: Sequence[int] | None = None) -> None:
        self._block, self._window, self._held = _Rows(table), window or len(table.rows), held
        self._nearest: list[int] = []
        self._found: dict[tuple[int, int, int], Region | None] = {}

    def around(self, wanted: Collection[int]) -> Iterator[Region]:
        """Every region that has one of these rows."""
        self._nearest = _nearest(wanted, len(self._block.rows))
        for last, row in enumerate(self._block.rows):
            if row.kind != OPERATOR or self._nearest[last] < 0 or self._superfluous(last):
                continue
            for dim in (*range(len(row.shape)), *(~g for g in range(len(row.sums)))):
                flow = _Flow(self._block, last)
                if flow.begin(dim):
                    yield from self._walk(flow, dim)

    def _walk(self, flow: "_Flow", dim: int) -> Iterator[Region]:
        """The regions of one last row and dim."""
        least, above = inf, flow.last + 1
        nearest = self._nearest[flow.last]
        for first in range(flow.last, max(0, flow.last - self._window + 1) - 1, -1):
            if self._block.fixed(first):
                return
            if not flow.take(first) or first > nearest or self._superfluous(first):
                continue
            if self._held and self._nearest[above - 1] < first and self._held[first] >= least:
                continue
            key = flow.last, dim, first
            if key not in self._found:
                self._found[key] = flow.region(first)
            region = self._found[key]
            if region is not None:
                least, above = self._held[first] if self._held else inf, first
                yield region

    def _superfluous(self, i: int) -> bool:
        """Whether a region does the same without a row at its begin or end: a view costs nothing whole either."""
        return self._held is not None and self._block.rows[i].storage != i


def _nearest(wanted: Collection[int], n_rows: int) -> list[int]:
    """For every row, the last wanted one up to it; -1 for none."""
    found, rows = list[int](), set(wanted)
    for i in range(n_rows):
        found.append(i if i in rows else found[-1] if found else -1)
    return found


class _Rows:
    """What the walks read of a table."""

    def __init__(self, table: Table) -> None:
        self.rows = table.rows
        self.readers: list[list[int]] = [[] for _ in table.rows]
        for i, row in enumerate(table.rows):
            for k in dict.fromkeys(row.inputs):
                self.readers[k].append(i)
        self.several = {row.inputs[0] for row in table.rows if row.op == GETITEM}
        """Rows of several results."""
        self.written = written_from(table)
        self.used = [{table.rows[k].storage for k in (i, *row.inputs)} for i, row in enumerate(table.rows)]

    def fixed(self, i: int) -> bool:
        """Whether a row is part of no region because of memory that is changed in place."""
        return bool(self.rows[i].writes or self.written[i] & self.used[i])


class _Flow:
    """The rows that are cut so far, going up from a last row.

    Attributes:
        cut: Rows of the run that are cut, with their dim.
        summed: Rows of the run that are summed.
        wanted: Rows that these read cut and that are not cut themselves (so far), with the dim.
        whole: Rows that these read whole.
        asked: Of `wanted`, those whose other readers have not been looked at.
        passed: The uppermost row of the run so far.
    """

    def __init__(self, block: _Rows, last: int) -> None:
        self.block, self.last, self.passed = block, last, last + 1
        self.cut: dict[int, int] = {}
        self.summed: set[int] = set()
        self.wanted: dict[int, int] = {}
        self.whole: set[int] = set()
        self.asked: list[int] = []

    def begin(self, dim: int) -> bool:
        """Cut the last row along a dim, or sum it over its group ~dim; False if that cannot be."""
        self.passed = self.last
        return self._add(self.last, dim)

    def take(self, i: int) -> bool:
        """Pass the next row upwards; whether it is cut or summed."""
        self.passed = i
        if self.block.rows[i].kind != OPERATOR:
            return False
        if i in self.cut or i in self.summed:
            return True
        taken = self._try(i, self.wanted[i]) if i in self.wanted else self._along(i)
        if taken:
            self._join()
        return taken

    def region(self, first: int) -> Region | None:
        """The run from a first row; None if sizes do not go together, or a row above it is cut already."""
        if min(self.cut, default=first) < first:
            return None
        dims, units = {**self.cut, **self.wanted}, 0
        for i, d in dims.items():
            units = gcd(units, self.block.rows[i].shape[d])
        if units < 2:
            return None
        inside = range(first, self.last + 1)
        before = tuple(
            i
            for i in inside
            if i not in self.cut and i not in self.summed and self.block.rows[i].kind == OPERATOR
        )
        region = Region(
            first=first,
            last=self.last,
            dims=dims,
            sums=tuple(sorted(self.summed)),
            before=before,
            units=units,
            n_chunks=units,
        )
        reach = reach_of(self.block.rows, region)
        # entries beside a piece would count twice in a sum
        return None if reach and self.summed else replace(region, reach=reach)

    def _try(self, i: int, dim: int) -> bool:
        """Cut or sum a row with all that follows from it, or leave everything as it is."""
        kept = dict(self.cut), set(self.summed), dict(self.wanted), set(self.whole), list(self.asked)
        if self._add(i, dim):
            return True
        self.cut, self.summed, self.wanted, self.whole, self.asked = kept
        return False

    def _along(self, i: int) -> bool:
        """Cut a row that no cut row reads, because it reads what is cut for others; False if that cannot be."""
        return any(self._try(i, dim) for dim in self._dims_of(i))

    def _dims_of(self, i: int) -> list[int]:
        """Dims of a row, or groups of its sums, that follow what is cut of its arguments."""
        row, known = self.block.rows[i], set[tuple[int, int]]()
        for k, j in enumerate(row.inputs):
            d = self.cut.get(j, self.wanted.get(j))
            if d is not None:
                known.add((k, d))
        if not known:
            return []
        dims = [d for d, pairs in enumerate(row.dims or ()) if known.intersection(pairs)]
        return dims + [~g for g, pairs in enumerate(row.sums) if known.intersection(pairs)]

    def _add(self, i: int, dim: int) -> bool:
        """Cut or sum one row, then what reads it; False, with everything half done, if that cannot be."""
        row = self.block.rows[i]
        if row.random or row.dims is None or i in self.whole:
            return False
        pairs = row.sums[~dim] if dim < 0 else row.dims[dim]
        asked = dict(pairs)
        if not pairs or any(asked[k] != d for k, d in pairs):
            return False
        if dim < 0:
            if i in self.wanted:
                return False
            self.summed.add(i)
        else:
            if self.wanted.pop(i, dim) != dim:
                return False
            self.cut[i] = dim
        return self._read(row, asked) and self._readers(i)

    def _read(self, row: Row, asked: dict[int, int]) -> bool:
        """Ask a row's arguments for what it reads of them."""
        for k, j in enumerate(row.inputs):
            inside = j in self.cut
            if j in self.summed:
                return False
            if k in asked:
                if self.cut.get(j, self.wanted.get(j, asked[k])) != asked[k] or j in self.whole:
                    return False
                if not inside:
                    self.wanted[j] = asked[k]
                    self.asked.append(j)
                    # several results in one are cut with all that read them, or not at all
                    if j in self.block.several and not self._add(j, asked[k]):
                        return False
            elif inside or j in self.wanted:
                return False
            else:
                self.whole.add(j)
        return True

    def _readers(self, i: int) -> bool:
        """Cut or sum whatever reads a row inside the run; a sum is read by nothing there."""
        for reader in self.block.readers[i]:
            if reader > self.last:
                if i in self.block.several:
                    return False
                continue
            if i in self.summed:
                return False
            if reader in self.cut or reader in self.summed:
                continue
            dims = self._dims_of(reader)
            if len(dims) != 1 or not self._add(reader, dims[0]):
                return False
        return True

    def _join(self) -> None:
        """Cut also those rows of the run that read what others read cut, where they can be."""
        while self.asked:
            j = self.asked.pop()
            for reader in self.block.readers[j] if j in self.wanted else ():
                passed = self.passed <= reader <= self.last
                if passed and reader not in self.cut and reader not in self.summed:
                    self._along(reader)
