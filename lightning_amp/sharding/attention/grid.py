"""Attention over a grid of ranks: an all-to-all gives groups of ranks whole heads, and rings join the groups' rows.

A consecutive ranks are a group. Within it each rank gets some heads of all of the group's rows (Jacobs et al.,
DeepSpeed Ulysses, 2023); then keys and values pass a ring of the ranks with the same heads, one of each group (Fang and
Zhao, USP, 2024). A = R is heads alone, A = 1 a ring alone. All ways are exact.

    way     A    a rank sends, forward and backward
    heads   R    2 (q + k + v + out) (R - 1) / R
    grid         2 (q + k + v + out) (A - 1) / A + (3 B - 2) (k + v)
    ring    1    (3 R - 2) (k + v)

Under a grid and by heads, keys of grouped heads are repeated where A does not divide them; in a ring they are passed as
they are. Ranks wait for those with more heads, and under a causal mask for the last rows.

Legend: R ranks; B = R / A groups; q, k, v and out are bytes of a rank's shards.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from lightning_amp.sharding.attention.ring import ring_attention
from lightning_amp.sharding.collectives import exchange_pieces
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.splits import MeshAxis

FLOPS_OF_BYTE = {torch.float16: 1000, torch.bfloat16: 1000}
OTHERS_OF_BYTE = 150
"""Floating point operations in the time in which a byte is sent: rounded, of an H100 and its NVLink."""
PRODUCTS = 7
"""Products of rows and columns in attention: two forward, five in the backward pass of a fused kernel."""


@lru_cache(maxsize=256)
def heads_over(
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype,
    rows: tuple[range, ...],
    columns: tuple[range, ...],
    causal: bool,
) -> int:
    """Return A, the ranks over which heads are split, that is estimated to take the least time.

    The time of sending is added to that of computation, by a ratio that is the same on all ranks, for they must choose
    the same: the plan of a run counts what was chosen with the rates of its device.

    Args:
        shapes: Of queries, keys and values of all ranks, [batch, head, row, dim].
        rows, columns: Positions of every rank's queries, and of its keys and values.
        causal: Whether a row attends to no later columns.
    """
    ranks, (batch, heads, _, dim), of_keys = len(rows), shapes[0], shapes[1][1]

    def cost(over: int) -> float:
        groups, repeats = _grouped(rows, over), 1
        scores = max(_scores(own, columns[-1].stop, causal=causal) for own in groups)
        if heads % over or of_keys % over:
            repeats = heads // of_keys
        q, k, v = (math.prod(shape) / ranks for shape in shapes)
        passed, out = repeats * (k + v), q / dim * shapes[2][3]
        sent = 2 * (q + passed + out) * (over - 1) / over + (3 * len(groups) - 2) * passed * (len(groups) > 1)
        flops = 2 * PRODUCTS * batch * dim * -(-heads // over) * scores
        return flops + FLOPS_OF_BYTE.get(dtype, OTHERS_OF_BYTE) * sent * dtype.itemsize

    # of equally fast ways the one with most heads
    ways = [over for over in range(min(ranks, heads), 0, -1) if ranks % over == 0]
    return min(ways, key=cost)


def _scores(rows: range, columns: int, *, causal: bool) -> int:
    """Return how many scores some rows have."""
    if not causal:
        return len(rows) * columns
    # up to row `most` a row has a score more than the one before
    most = min(max(rows.start, columns), rows.stop)
    return (rows.start + 1 + most) * (most - rows.start) // 2 + (rows.stop - most) * columns


def grid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    over: int,
    axis: MeshAxis,
    rows: Sequence[range],
    columns: Sequence[range],
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute attention of this rank's queries to the keys and values of all ranks.

    Args:
        q, k, v: Local shards, [batch, head, row, dim]; all have the same dim.
        over: A; it divides the number of ranks.
        mask: Mask of the local queries and all columns if `over` is 1, else of all rows; see `ring_attention`.
        axis, rows, columns, scale, causal: As in `ring_attention`, of all ranks.
    """
    if over == 1:
        return ring_attention(q, k, v, axis=axis, rows=rows, columns=columns, scale=scale, mask=mask, causal=causal)
    heads, own = q.shape[1], axis.rank % over
    if k.shape[1] != heads and (heads % over or k.shape[1] % over):
        # a rank's queries would read heads of keys that another rank has
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    spans_of = (q, rows), (k, columns), (v, columns)
    q, k, v = (
        cast(Tensor, _Regroup.apply(x, axis, _Group.of(axis, over, x.shape[1], spans), True)) for x, spans in spans_of
    )
    of_groups, columns = _grouped(rows, over), _grouped(columns, over)
    if mask is not None:
        if mask.dim() > 2 and mask.shape[-3] > 1:
            (first,) = Owners.even(heads, over).spans[own]
            mask = mask.narrow(-3, first.start, len(first))
        if mask.shape[-2] > 1:
            span = of_groups[axis.rank // over]
            mask = mask.narrow(-2, span.start, len(span))
    out = ring_attention(
        q, k, v, axis=axis, rows=of_groups, columns=columns, scale=scale, mask=mask, causal=causal, step=over
    )
    return cast(Tensor, _Regroup.apply(out, axis, _Group.of(axis, over, heads, rows), False))


def _grouped(spans: Sequence[range], over: int) -> list[range]:
    """Return the positions of each group of consecutive ranks."""
    return [range(spans[i].start, spans[i + over - 1].stop) for i in range(0, len(spans), over)]


class _Group:
    """The group of this rank: heads and rows of each of its ranks, in order."""

    def __init__(self, first: int, own: int, heads: Sequence[int], rows: Sequence[int]) -> None:
        self.first, self.own, self.heads, self.rows = first, own, heads, rows

    @classmethod
    def of(cls, axis: MeshAxis, over: int, heads: int, spans: Sequence[range]) -> "_Group":
        own = axis.rank % over
        first = axis.rank - own
        return cls(first, own, Owners.even(heads, over).counts, [len(span) for span in spans[first : first + over]])


class _Regroup(torch.autograd.Function):
    """From all heads of the own rows to some heads of the group's rows, or back; each is the other's adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, group: _Group, to_heads: bool) -> Tensor:
        ctx.of = axis, group, not to_heads
        # [batch, row, head, dim], the memory order in which kernels read rows
        x, heads, rows = x.transpose(1, 2), group.heads, group.rows
        parts = x.split(list(heads), 2) if to_heads else x.split(list(rows), 1)
        sizes = [(n, heads[group.own]) if to_heads else (rows[group.own], n) for n in (rows if to_heads else heads)]
        shapes = [(x.shape[0], n_rows, n_heads, x.shape[3]) for n_rows, n_heads in sizes]
        before, after = group.first, axis.size - group.first - len(rows)
        nothing = x.new_empty(0)
        pieces = [*[nothing] * before, *(part.reshape(-1) for part in parts), *[nothing] * after]
        take = [*[0] * before, *map(math.prod, shapes), *[0] * after]
        arrived = exchange_pieces(pieces, take, axis)[before : axis.size - after]
        made = [piece.view(shape) for piece, shape in zip(arrived, shapes, strict=True)]
        return torch.cat(made, 1 if to_heads else 2).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return cast(Tensor, _Regroup.apply(grad, *ctx.of)), None, None, None
