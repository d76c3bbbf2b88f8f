"""Ring attention: attention over sequence-sharded queries, keys and values, whose blocks are passed around the ranks.

Each rank keeps its queries. Keys and values are passed from rank to rank, and the results of blocks are merged by the
logarithms of their sums of exponentials (Liu, Zaharia and Abbeel, Ring Attention, 2023). In the backward pass, a
block's kernel receives the output and the logarithms of all blocks, and returns the gradients of that block. Gradients
of keys and values are passed on with their block, and end at the block's owner. Keys and values may have fewer heads;
those are repeated for one block at a time.

Collectives: R - 1 ring steps in the forward pass with keys and values; in the backward pass R - 1 with these, and R
with their gradients. All but the last overlap with the computation of a block.

Legend: `log_sums` are logarithms of sums of exponentials, [batch, head, row]; R ranks of a ring.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_amp.derivatives import first_only
from lightning_amp.sharding._torch import never_compiled
from lightning_amp.sharding.attention.blocks import block_backward, block_forward, merged
from lightning_amp.sharding.attention.written_out import Block
from lightning_amp.sharding.collectives import ring
from lightning_amp.sharding.splits import MeshAxis


@never_compiled
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: MeshAxis,
    rows: Sequence[range],
    columns: Sequence[range],
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    step: int = 1,
) -> Tensor:
    """Compute attention of this rank's queries to the keys and values of the ranks of its ring.

    Args:
        q, k, v: Local shards, [batch, head, row, dim]; all have the same dim.
        rows, columns: Positions of the queries, and of the keys and values, of each rank of a ring.
        mask: Mask of the local queries and all columns, added to the scores; a boolean mask is True where attended.
        causal: Whether a row attends to no later columns.
        step: Distance of neighbours in a ring: ranks r, r + step, r + 2 step, ... of the axis are one ring.
    """
    return cast(Tensor, _Ring.apply(q, k, v, mask, causal, scale, axis, rows, columns, step))


def seen_of(mask: Tensor | None, causal: bool, rows: range, columns: range, device: Any) -> Any:
    """Return (whether the block is causal, its mask) for a block of columns; None if all of it is masked."""
    if not causal:
        return False, mask if mask is None or mask.shape[-1] == 1 else mask[..., columns.start : columns.stop]
    if columns.start >= rows.stop:
        return None
    if columns.stop - 1 <= rows.start:
        return False, None
    if rows.start == columns.start:
        return True, None
    column = torch.arange(columns.start, columns.stop, device=device)
    return False, column[None] <= torch.arange(rows.start, rows.stop, device=device)[:, None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *of: Any) -> Tensor:
        causal, scale, axis, rows, columns, distance = ctx.of = of
        out: Tensor | None = None
        log_sums = q.new_empty(0)
        held, size, own_place = [k, v], len(rows), axis.rank // distance
        for step in range(size):
            at = (own_place - step) % size
            arrive = None
            if step + 1 < size:
                n = len(columns[(at - 1) % size])
                # overlaps with the computation of this block
                arrive = ring(held, [_with_rows(t, n) for t in (k, v)], axis, distance)
            how = seen_of(mask, causal, rows[own_place], columns[at], q.device)
            if how is not None:
                found, own = block_forward(Block(q, held[0], held[1], how[1], how[0], scale))
                out, log_sums = (found, own) if out is None else merged(out, log_sums, found, own)
            if arrive is not None:
                held = arrive()
        if out is None:
            # all columns are masked
            out, log_sums = torch.zeros_like(q[..., : v.shape[-1]]), q.new_full(q.shape[:3], float("-inf"))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, log_sums)
        return out

    @staticmethod
    @first_only("attention over samples that are split over ranks; leave them whole")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, log_sums = ctx.saved_tensors
        causal, scale, axis, rows, columns, distance = ctx.of
        # the memory order in which kernels read them, copied once for all blocks
        grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
        held, size, own_place = [k, v], len(rows), axis.rank // distance
        of_q: Tensor | None = None
        sums, arrive_sums = list[Tensor](), None
        for step in range(size):
            at = (own_place - step) % size
            shapes = [_with_rows(t, len(columns[(at - 1) % size])) for t in (k, v)]
            # sends keys, values, and gradients of the previous block while this block is computed
            arrive = ring(held, shapes, axis, distance) if step + 1 < size else None
            how, found = seen_of(mask, causal, rows[own_place], columns[at], q.device), list[Tensor]()
            if how is not None:
                found = [*block_backward(Block(q, held[0], held[1], how[1], how[0], scale), grad, out, log_sums)]
            if arrive_sums is not None:
                sums = arrive_sums()
            if found:
                of_q = found[0] if of_q is None else of_q.add_(found[0])
                sums = [a.add_(b) for a, b in zip(sums, found[1:], strict=True)] if sums else found[1:]
                found.clear()
            elif not sums:
                sums = [torch.zeros_like(t) for t in held]
            # the last step returns gradients to the owners
            arrive_sums = ring(sums, shapes, axis, distance)
            sums = []
            held = held if arrive is None else arrive()
        assert arrive_sums is not None, "there is a rank"
        of_k, of_v = arrive_sums()
        of_q = torch.zeros_like(q) if of_q is None else of_q
        return of_q, of_k, of_v, *[None] * 7


def _with_rows(x: Tensor, n: int) -> list[int]:
    return [*x.shape[:2], n, x.shape[3]]
