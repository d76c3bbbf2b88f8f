"""Walk upwards through the rows of a table, from the last row of a region, and return the regions that are legal."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from math import gcd

from lightning_amp.graph.table import OPERATOR, OperatorRow, Table
from lightning_amp.techniques.chunk.regions.region import GETITEM, Region, reach_of, written_from


def nearest(wanted: Collection[int], n_rows: int) -> list[int]:
    """Return for every row the last wanted row up to it; -1 if there is none."""
    found, rows = list[int](), set(wanted)
    for i in range(n_rows):
        found.append(i if i in rows else found[-1] if found else -1)
    return found


class RowsOfTable:
    """Data of a table that the walks need.

    Attributes:
        readers: Readers of every row.
        several: Rows with several results.
        fixed_up_to: For every row, the last row up to it that is in no region, because memory is changed in place.
    """

    def __init__(self, table: Table) -> None:
        self.rows = table.rows
        self.readers: list[list[int]] = [[] for _ in table.rows]
        for i, row in enumerate(table.rows):
            for k in dict.fromkeys(row.inputs):
                self.readers[k].append(i)
        self.several = {row.inputs[0] for row in table.rows if row.op == GETITEM}
        written = written_from(table)
        fixed = [
            i
            for i, row in enumerate(table.rows)
            if row.writes or not written[i].isdisjoint(table.rows[k].storage for k in (i, *row.inputs))
        ]
        self.fixed_up_to = nearest(fixed, len(table.rows))


class Walk:
    """The walk of one last row and dim, which continues where it ended: searches around other rows repeat it.

    Args:
        block: The rows.
        last: Row at which it begins.
        dim: Dim of that row, or one of its sums.
    """

    def __init__(self, block: RowsOfTable, last: int, dim: int) -> None:
        self._block, self.last, self._dim = block, last, dim
        self._firsts: list[int] = []
        self._regions: dict[int, Region | None] = {}
        self._begin()

    def _begin(self) -> None:
        self._flow = flow = Flow(self._block, self.last)
        end = self._block.fixed_up_to[self.last]
        self._further = flow.upwards(end) if flow.begin(self._dim) else iter(())
        self._passed = 0

    def firsts(self) -> Iterator[int]:
        """Yield the rows with which a region may begin, from the last row upwards."""
        place = 0
        while place < len(self._firsts) or self._go(place):
            yield self._firsts[place]
            place += 1

    def _go(self, place: int) -> bool:
        """Walk on to the row at a place; return False at the end."""
        while self._passed <= place:
            first = next(self._further, None)
            if first is None:
                return False
            if self._passed == len(self._firsts):
                self._firsts.append(first)
            self._passed += 1
        return True

    def region(self, place: int) -> Region | None:
        """Return the region that begins at a place of `firsts`; None if it is not legal. The same object each time."""
        if place not in self._regions:
            if self._passed > place + 1:
                # the walk has been further, and its state is that of a later row
                self._begin()
            self._go(place)
            self._regions[place] = self._flow.region(self._firsts[place])
        return self._regions[place]


class Flow:
    """State of one walk: the rows that are cut so far, from the last row upwards.

    Attributes:
        cut: Cut rows of the run, with their dim.
        summed: Rows of the run whose results are summed over the pieces.
        wanted: Rows that cut rows read in pieces and that are not cut themselves so far, with the dim.
        whole: Rows that every piece reads completely.
        unchecked: Rows of `wanted` whose other readers have not been checked.
        passed: The first row of the run so far.
    """

    def __init__(self, block: RowsOfTable, last: int) -> None:
        self.block, self.last, self.passed = block, last, last + 1
        self.cut: dict[int, int] = {}
        self.summed: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.whole: dict[int, int] = {}
        self.unchecked: list[int] = []
        self._changes: list[tuple[dict[int, int], int, int | None]] = []
        """Previous value of every change, to undo the changes for a row that cannot be cut."""
        self._next: list[int] = []
        """Rows to try, as a heap of negative indices: wanted rows, and readers of wanted rows."""

    def begin(self, dim: int) -> bool:
        """Cut the last row along a dim, or sum it over its group ~dim; return False if that is not possible."""
        self.passed = self.last
        return self._add(self.last, dim)

    def upwards(self, end: int) -> Iterator[int]:
        """Pass all rows that can be cut or summed, down to the row after `end`, and yield them."""
        if self.last > end:
            yield self.last
        while self._next:
            i = -heappop(self._next)
            if i <= end:
                return
            if i < self.passed and self._take(i):
                yield i

    def _take(self, i: int) -> bool:
        """Pass a row; return whether it is cut or summed."""
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
        """Return the run from a first row; None if sizes share no divisor, an earlier row is cut, or sums overlap."""
        # a row with several results is cut together with all of them, and may be before `first`
        if min(self.cut, default=first) < first:
            return None
        # from here on, wanted rows that are not cut are inputs of the run that are cut
        dims, units = {**self.cut, **self.wanted}, 0
        for i, d in dims.items():
            units = gcd(units, self.block.rows[i].shape[d])
        if units < 2:
            return None
        inside = range(first, self.last + 1)
        before = tuple(
            i for i in inside if i not in self.cut and i not in self.summed and self.block.rows[i].kind == OPERATOR
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
        # the neighbours of a piece would be counted twice in a sum
        return None if reach and self.summed else replace(region, reach=reach)

    def _try(self, i: int, dim: int) -> bool:
        """Cut or sum a row and the rows that this requires; if not possible, undo everything and return False."""
        n_changes, n_unchecked = len(self._changes), len(self.unchecked)
        if self._add(i, dim):
            return True
        while len(self._changes) > n_changes:
            rows, k, before = self._changes.pop()
            if before is None:
                rows.pop(k, None)
            else:
                rows[k] = before
        del self.unchecked[n_unchecked:]
        return False

    def _set(self, rows: dict[int, int], i: int, dim: int | None) -> None:
        """Set the dim of a row, or remove it if None, and record the change so that it can be undone."""
        self._changes.append((rows, i, rows.get(i)))
        if dim is None:
            rows.pop(i, None)
        else:
            rows[i] = dim

    def _along(self, i: int) -> bool:
        """Cut a row that no cut row reads but that reads a cut or wanted row; return False if that is not possible."""
        return any(self._try(i, dim) for dim in self._dims_of(i))

    def _dims_of(self, i: int) -> list[int]:
        """Return the dims of a row (or ~group for its sums) that follow the cut dims of its arguments."""
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
        """Cut or sum one row, then its readers; return False if that is not possible, without undoing the changes."""
        row = self.block.rows[i]
        if row.random or row.dims is None or i in self.whole:
            return False
        pairs = row.sums[~dim] if dim < 0 else row.dims[dim]
        # a tensor that is passed as two arguments, or read along two dims, must be cut in one way: `dict` keeps the
        # last dim of each argument, so that a different first one fails the comparison below
        dims = dict(pairs)
        if not pairs or any(dims[k] != d for k, d in pairs):
            return False
        if dim < 0:
            if i in self.wanted:
                return False
            self._set(self.summed, i, dim)
        else:
            if self.wanted.get(i, dim) != dim:
                return False
            self._set(self.wanted, i, None)
            self._set(self.cut, i, dim)
            self._note(i)
        return self._read(row, dims) and self._readers(i)

    def _read(self, row: OperatorRow, dims: dict[int, int]) -> bool:
        """Mark a row's arguments as wanted along their dims, or as read whole; return False if that conflicts."""
        # by argument position and not by row: `x @ x` reads one row along its rows and whole, which rules out a cut
        for k, j in enumerate(row.inputs):
            inside = j in self.cut
            if j in self.summed:
                return False
            if k in dims:
                if self.cut.get(j, self.wanted.get(j, dims[k])) != dims[k] or j in self.whole:
                    return False
                if not inside:
                    self._set(self.wanted, j, dims[k])
                    self.unchecked.append(j)
                    self._note(j)
                    # an operator with several results is cut with all their readers, or not at all
                    if j in self.block.several and not self._add(j, dims[k]):
                        return False
            elif inside or j in self.wanted:
                return False
            else:
                # recorded so that no other row can want it cut: a piece would not have all of it
                self._set(self.whole, j, 0)
        return True

    def _note(self, i: int) -> None:
        """Add row i, which is cut or wanted, and its readers to the rows to try."""
        for k in (i, *self.block.readers[i]):
            if k < self.passed:
                heappush(self._next, -k)

    def _readers(self, i: int) -> bool:
        """Cut or sum all readers of a row inside the run; return False if one cannot be. A sum may have no reader."""
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
            # a reader that could be cut along two dims is not cut, because nothing decides between them
            if len(dims) != 1 or not self._add(reader, dims[0]):
                return False
        return True

    def _join(self) -> None:
        """Cut other readers of wanted rows inside the run as well, where possible."""
        while self.unchecked:
            j = self.unchecked.pop()
            for reader in self.block.readers[j] if j in self.wanted else ():
                passed = self.passed <= reader <= self.last
                if passed and reader not in self.cut and reader not in self.summed:
                    self._along(reader)
