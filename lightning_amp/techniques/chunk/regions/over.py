"""Find results that can reuse the memory of an argument in inference, which no later operator reads.

`may_write` says when: the memory is the block's own, and its last reader, by any view of it, is the row that writes or
comes before that. An argument, a parameter or a result of the block is never written over.

A region's output may take that of an input: a piece of it is written when it has been computed, into the bytes of the
same piece of the input. That changes nothing where the input is read cut, no other input of the region may lie in its
memory (later pieces read it), and piece and piece are the same bytes: as many pieces side by side, as large.
"""

from collections.abc import Collection, Sequence
from math import prod

from lightning_amp.graph.table import OperatorRow, Table
from lightning_amp.techniques.chunk.regions.region import Region


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
