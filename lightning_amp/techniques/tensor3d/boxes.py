"""Find the boxes of adjacent entries that a flat part covers in the whole parameter, for checkpoints in parts."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from torch import Tensor

from lightning_amp.dist.splits import Splits

Place = tuple[int, ...]


def boxes_of(own: Tensor, run: range, block: Sequence[int], splits: Splits) -> Iterator[tuple[Place, Tensor]]:
    """Offsets in the whole tensor, and a view of the entries, of every box.

    Args:
        own: The part, flat; what is longer than the run is padding.
        run: Its entries among those of the block, flat.
        block: Shape of the entries that are this rank's along the split dims.
        splits: The split dims.
    """
    at = 0
    for starts, sizes in run_boxes(run.start, run.stop, block):
        values = own[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)
        dims = [_runs(splits, d, start, n) for d, (start, n) in enumerate(zip(starts, sizes, strict=True))]
        for pieces in product(*dims):
            box = values
            for d, (_, first, n) in enumerate(pieces):
                box = box.narrow(d, first, n)
            yield tuple(place for place, _, _ in pieces), box


def run_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[Place, Place]]:
    """Offsets and sizes of the boxes that make up a run of a flat tensor, in its order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    # a part of a row, whole rows, a part of a row
    if first > last:
        ends = [(last, start - last * inner, stop - last * inner)]
    else:
        ends = [(first - 1, start - (first - 1) * inner, inner)] if start < first * inner else []
    for row, low, high in ends:
        yield from (((row, *o), (1, *s)) for o, s in run_boxes(low, high, shape[1:]))
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if first <= last:
        yield from (((last, *o), (1, *s)) for o, s in run_boxes(0, stop - last * inner, shape[1:]))


def _runs(splits: Splits, dim: int, start: int, n: int) -> list[tuple[int, int, int]]:
    """Of n of this rank's indices of a dim: every run's place in the whole, its place among them, its length."""
    split = splits.at(dim)
    if split is None:
        return [(start, 0, n)]
    found, before = list[tuple[int, int, int]](), -start
    for span in split.owners.spans[split.axis.rank]:
        low, high = max(before, 0), min(before + len(span), n)
        if low < high:
            found.append((span.start + low - before, low, high - low))
        before += len(span)
    return found
