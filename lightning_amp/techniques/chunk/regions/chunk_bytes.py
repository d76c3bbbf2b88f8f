"""Count the live bytes of a captured block whose regions run in pieces, row by row, forward and backward.

Two tables are built, and counted by `graph/peak.py`:

    one piece      the region's rows with the sizes of the longest piece; its inputs exist
    the block      each region is one row without a result: it reads the region's inputs and its outputs, which rows
                   before it allocate in full size; while it runs, the bytes of one piece are alive

    forward(i in a region)   = full tensors alive + outputs of the region + forward of one piece at i
    backward(i in a region)  = saved + pending gradients + full gradients of the region's inputs
                               + the larger of forward (recomputed, with what it saves) and backward of one piece at i

In training, a region saves only its inputs. Sums over pieces of 16-bit numbers are accumulated in 32 bits.

The workspace of an operator scales with the cut dim like its result. If the operator reads an activation whole, a copy
of that activation need not shrink, and is counted in full. A non-contiguous piece is copied when a matrix product reads
it. Both are upper bounds; everything else is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from lightning_amp.graph.peak import BlockBytes, PieceRow, block_bytes
from lightning_amp.graph.table import INPUT, OPERATOR, PARAMETER, OperatorRow, Table
from lightning_amp.techniques.chunk.regions.region import Region, piece_length, within, written_over

COPYING = ("aten.linear.", "aten.matmul.", "aten.einsum.")
"""Matrix products, which copy a non-contiguous argument."""
WIDTHS = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int16": 2}
WIDTHS |= {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16}
NARROW = ("float16", "bfloat16")


def chunk_bytes(table: Table, regions: Sequence[Region], *, train: bool = False) -> BlockBytes:
    """Count a block whose regions are computed piece by piece; no two regions share a row.

    Returns:
        Bytes by the rows of the block, as `graph.peak.block_bytes` counts the block without regions.
    """
    outer, at = _Outer(table, train=train), 0
    for region in sorted(regions, key=lambda region: region.first):
        assert region.first >= at, f"two regions have row {region.first!r}"
        outer.whole(range(at, region.first))
        outer.region(region)
        at = region.last + 1
    outer.whole(range(at, len(table.rows)))
    return outer.count()


def result_bytes(row: OperatorRow) -> int:
    """Return the size of a row's result in separate memory."""
    return prod(row.shape) * WIDTHS.get(row.dtype, 4)


@dataclass(slots=True)
class _Sizes:
    """A row that pieces compute, and its bytes for the full size of the cut dim.

    Attributes:
        summed: Whether each piece has a result of full size.
        uncut: Bytes of activations that it reads whole, whose copies need not shrink.
        copied: Bytes of arguments that it copies because a piece of them is not contiguous.
        passing: Bytes of its result if such a copy makes it run in two steps; otherwise 0.
        handed: Bytes of a copy that its backward pass makes of its result's gradient; 0 without one.
        last_use: Last reader in inference.
        outlives: Whether a row after the region reads its result.
    """

    row: OperatorRow
    summed: bool
    uncut: int
    copied: tuple[int, ...]
    passing: int
    handed: int
    inputs: tuple[int, ...]
    storage: int
    saved: tuple[int, ...]
    over: int
    cut: tuple[bool, ...]
    last_use: int
    outlives: bool


class Pieces:
    """Table of one piece of a region: the region's inputs, its rows with the sizes of a piece, and its outputs.

    In training, outputs of a piece live until its backward pass; in inference they are copied and freed at once.

    Args:
        table: A captured block.
        region: A region, in any number of pieces.
    """

    def __init__(self, table: Table, region: Region) -> None:
        self._old, self._region = table.rows, region
        self.inputs, self.inside, self.outputs = (region.inputs(table), region.inside(table), region.outputs(table))
        self._place = {i: n for n, i in enumerate((*self.inputs, *self.inside))}
        self._homes = {i: self._place[i] for i in self.inputs}
        self._scattered = {i for i in self.inputs if self._is_scattered(i)}
        """Inputs whose pieces are not contiguous, and views of such pieces."""
        self._handed = {i for i in self.outputs if self._is_scattered(i)}
        """Rows whose gradient is a non-contiguous piece of an output's gradient, or a view of one."""
        for i in reversed(self.inside):
            if i in self._handed and not any(self._old[i].grad_bytes):
                self._handed.update(self._old[i].inputs)
        given = (table.rows[i] for i in self.inputs)
        self._given = [
            PieceRow(PARAMETER if row.kind == PARAMETER else INPUT, (), 0, n, 0, row.needs_grad)
            for n, row in enumerate(given)
        ]
        last = {k: self._place[i] for i in self.inside for k in self._old[i].inputs}
        self._sizes = [self._sizes_of(i, last.get(i, self._place[i])) for i in self.inside]
        sums = (table.rows[i] for i in region.sums)
        self.wide_bytes = sum(2 * result_bytes(row) for row in sums if row.dtype in NARROW)
        """Bytes of sums over pieces of 16-bit numbers, which are accumulated in 32 bits."""
        self.learns = any(table.rows[i].needs_grad for i in self.outputs)
        """Whether a piece has a backward pass."""

    def once(self, n_chunks: int) -> BlockBytes:
        """Count the longest of `n_chunks` pieces in inference."""
        return block_bytes(*self._table(n_chunks, train=False), train=False)

    def again(self, n_chunks: int) -> BlockBytes:
        """Count the longest of `n_chunks` pieces when it is recomputed, with its backward pass."""
        return block_bytes(*self._table(n_chunks, train=True), gradients_of_arguments=False)

    def _table(self, n_chunks: int, *, train: bool) -> tuple[list[PieceRow], Sequence[int]]:
        units = self._region.units
        # the longest piece has neighbours on both sides
        length = min(piece_length(units, n_chunks) + 2 * self._region.reach, units)

        def part(whole: int) -> int:
            return -(-whole * length // units)

        def work(n_bytes: int, uncut: int) -> int:
            return min(n_bytes, part(n_bytes) + uncut) if n_bytes > 0 else part(n_bytes)

        rows, end = list(self._given), len(self._place)
        for x in self._sizes:
            row, copied = x.row, sum(map(part, x.copied))
            passing = max(copied, part(x.passing))
            # a copy of an argument is saved in its place; an operator that saves nothing frees its copy at once, such
            # as one whose argument requires no gradient
            kept = copied if train and (row.saved or row.hidden_bytes) else 0
            found = PieceRow(
                OPERATOR,
                x.inputs,
                row.n_bytes if x.summed else part(row.n_bytes),
                x.storage,
                end if train and x.outlives else x.last_use,
                row.needs_grad,
                over=x.over,
                forward_bytes=work(row.forward_bytes, x.uncut) + passing - min(kept, passing),
            )
            if train:
                found.saved = x.saved
                found.hidden_bytes = work(row.hidden_bytes, x.uncut) + kept
                grads = zip(row.grad_bytes, x.cut, strict=True)
                found.grad_bytes = tuple(part(n) if cut else n for n, cut in grads)
                found.backward_bytes = work(row.backward_bytes, x.uncut) + copied - kept + part(x.handed)
            rows.append(found)
        return rows, [self._place[i] for i in self.outputs] if train else ()

    def _sizes_of(self, i: int, last_use: int) -> _Sizes:
        row, dims = self._old[i], self._region.dims
        if row.storage != i and self._scattered.intersection(row.inputs):
            self._scattered.add(i)
        self._homes[i] = self._home(i, row.storage)
        read = [(k, self._old[k]) for k in dict.fromkeys(row.inputs)]
        product, result = row.op.startswith(COPYING), result_bytes(row)
        # a product copies a piece with more than two dims; a linear layer then adds its bias in a separate step
        copied = [result_bytes(x) for k, x in read if product and k in self._scattered and len(x.shape) > 2]
        apart = copied and row.op.startswith("aten.linear.") and len(row.inputs) > 2
        handed = product and i in self._handed and len(row.shape) > 2
        return _Sizes(
            row=row,
            summed=i in self._region.sums,
            uncut=sum(result_bytes(x) for k, x in read if k not in dims and x.kind != PARAMETER),
            copied=tuple(copied),
            passing=result if apart else 0,
            handed=result if handed else 0,
            inputs=tuple(self._place[k] for k in row.inputs),
            storage=self._homes[i],
            saved=tuple({self._home(i, s) for s in row.saved}),
            over=self._place[row.over] if within(self._old, row, self.inside) else -1,
            cut=tuple(k in dims for k, _ in zip(row.inputs, row.grad_bytes, strict=False)),
            last_use=last_use,
            outlives=i in self.outputs,
        )

    def _is_scattered(self, i: int) -> bool:
        dim = self._region.dims.get(i)
        return dim is not None and prod(self._old[i].shape[:dim]) > 1

    def _home(self, i: int, storage: int) -> int:
        """Return the memory that a row makes, or shares with one of its arguments."""
        if storage == i:
            return self._place[i]
        return next(self._homes[k] for k in self._old[i].inputs if self._old[k].storage == storage)


class _Outer:
    """Builds the table of a block in which each region is one row."""

    def __init__(self, table: Table, *, train: bool) -> None:
        self._table, self._train, self._old = table, train, table.rows
        self._rows: list[OperatorRow] = []
        self._place: dict[int, int] = {}
        """Index in `_rows` of each row of the block."""
        self._inner: dict[int, tuple[int, int, int]] = {}
        """For rows that pieces compute: index of the region's row, and by how much they take less, in either pass."""

    def count(self) -> BlockBytes:
        """Return the bytes by the rows of the block as it was captured."""
        outputs = tuple(self._place[k] for k in self._table.outputs)
        # recomputed: rows have other indices here, and a region reads its inputs and outputs until it ends
        last = {k: n for n, row in enumerate(self._rows) for k in row.inputs}
        last |= dict.fromkeys(outputs, len(self._rows))
        rows = [replace(row, last_use=last.get(n, n)) for n, row in enumerate(self._rows)]
        found = block_bytes(rows, outputs, train=self._train)
        forward, backward = [0] * len(self._old), [0] * len(self._old)
        for i, n in self._place.items():
            forward[i], backward[i] = found.forward[n], found.backward[n] if self._train else 0
        for i, (n, below, below_again) in self._inner.items():
            forward[i] = found.forward[n] - below
            backward[i] = found.backward[n] - below_again if self._train else 0
        return BlockBytes(
            forward=tuple(forward), backward=tuple(backward) if self._train else (), saved_bytes=found.saved_bytes
        )

    def whole(self, rows: Sequence[int]) -> None:
        """Copy rows that are computed whole."""
        for i in rows:
            self._put(i, self._old[i])

    def _put(self, i: int, row: OperatorRow) -> None:
        """Copy row i of the block, with new indices."""
        self._place[i] = n = len(self._rows)
        inputs = tuple(self._place[k] for k in row.inputs)
        homes = {s: self._homes(row, s) for s in (*row.saved, row.storage) if s != i}
        # several outputs of a region that were views of one memory have separate memory: any of it may be saved
        saved = {h for s in row.saved for h in homes.get(s, [n])}
        storage = n if row.storage == i else homes[row.storage][0]
        over = self._place[row.over] if row.over >= 0 else -1
        self._rows.append(
            replace(row, inputs=inputs, storage=storage, saved=tuple(sorted(saved)), writes=(), over=over)
        )

    def _homes(self, row: OperatorRow, storage: int) -> list[int]:
        """Return the memory that a row shares with some of its arguments."""
        shared = (k for k in row.inputs if self._old[k].storage == storage)
        return [self._rows[self._place[k]].storage for k in shared]

    def region(self, region: Region) -> None:
        """Add the rows before the pieces, the outputs, and one row that represents all pieces."""
        self.whole([i for i in range(region.first, region.last + 1) if self._old[i].kind != OPERATOR])
        for i in region.before:
            self._put(i, replace(self._old[i], over=-1))
        over = written_over(self._table, region)
        for i in region.outputs(self._table):
            row = self._old[i]
            self._put(
                i,
                OperatorRow(
                    name=row.name,
                    kind=OPERATOR,
                    storage=i,
                    n_bytes=result_bytes(row),
                    needs_grad=row.needs_grad,
                    over=over.get(i, -1),
                ),
            )
        pieces = Pieces(self._table, region)
        inputs, outputs, learns = pieces.inputs, pieces.outputs, self._train and pieces.learns
        once, again = pieces.once(region.n_chunks), pieces.again(region.n_chunks)
        grads = [result_bytes(self._old[i]) if self._old[i].needs_grad else 0 for i in inputs]
        read = (*(self._place[i] for i in inputs), *(self._place[i] for i in outputs))
        n = len(self._rows)
        self._rows.append(
            OperatorRow(
                name=f"pieces of {self._old[region.first].name}",
                kind=OPERATOR,
                inputs=read,
                storage=n,
                saved=tuple(sorted({self._rows[self._place[i]].storage for i in inputs})) if learns else (),
                forward_bytes=max(once.forward) + pieces.wide_bytes,
                grad_bytes=(*grads, *(0 for _ in outputs)),
                backward_bytes=again.peak_bytes if learns else 0,
                needs_grad=learns,
            )
        )
        # this row has the peak of a piece; `count` subtracts the difference for each row of the piece
        for k, i in enumerate(pieces.inside, start=len(inputs)):
            beside = (max(once.forward) - once.forward[k], again.peak_bytes - max(again.forward[k], again.backward[k]))
            self._inner[i] = (n, *beside)
