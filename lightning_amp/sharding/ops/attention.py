"""Compute attention of sharded tensors.

Where rows of queries and of keys are sharded over one axis, there are three ways, all exact; each attention takes the
one that is estimated to be fastest (attention/grid.py):

    heads   an all-to-all gives each rank all rows of some heads, torch's kernel computes these, and another all-to-all
            returns the rows
    ring    keys and values are passed around the ranks (attention/ring.py)
    grid    heads within groups of ranks, and a ring of the groups

Legend: `log_sums` are logarithms of sums of exponentials, [batch, head, row].
"""

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.derivatives import first_only
from lightning_amp.sharding.attention.blocks import block_backward, block_forward
from lightning_amp.sharding.attention.grid import grid_attention, heads_over
from lightning_amp.sharding.attention.written_out import Block
from lightning_amp.sharding.collectives import reduce_now
from lightning_amp.sharding.dispatch.by_rule import by_rule, with_whole
from lightning_amp.sharding.ops.random import kept
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.redistribute import own_part
from lightning_amp.sharding.registry import operator, shard_error
from lightning_amp.sharding.sharded_tensor import (
    computed_in,
    held_by,
    in_order,
    local_of,
    part_in,
    redistribute,
    shape_of,
    splits_of,
    wrap,
)
from lightning_amp.sharding.splits import MeshAxis, Split, Splits


class _SplitColumns(torch.autograd.Function):
    """Attention with replicated queries and sharded keys and values: results of all ranks are merged."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, axis: MeshAxis) -> Tensor:
        found, own = block_forward(Block(q, k, v, mask, False, scale))
        # relative to the maximum of all ranks, exponentials do not overflow
        top = reduce_now(own, axis, torch.distributed.ReduceOp.MAX)
        top = torch.where(torch.isfinite(top), top, 0)
        share = (own - top).exp()
        total = reduce_now(share, axis)
        out = reduce_now(found * (share / total)[..., None].nan_to_num(0), axis).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, total.log() + top)
        ctx.of = scale, axis
        return out

    @staticmethod
    @first_only("attention over samples that are split over ranks; leave them whole")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, log_sums = ctx.saved_tensors
        scale, axis = ctx.of
        grad = reduce_now(grad, axis)
        block = Block(q, k, v, mask, False, scale)
        return (*block_backward(block, grad, out, log_sums), None, None, None)


@operator("scaled_dot_product_attention")
def _attention(
    func: Any, q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, *, scale: Any, enable_gqa: bool
) -> Any:
    scale = shape_of(q)[-1] ** -0.5 if scale is None else scale
    if causal and mask is not None:
        raise shard_error(func, [q, k, v, mask], "it has a mask and is causal", remedy="put both into the mask")
    # broadcast samples and heads: a shard of keys of size 1 would not match the shard of the queries
    own = -3 if enable_gqa else -2
    whole = torch.broadcast_shapes(*(shape_of(t)[:own] for t in (q, k, v)))
    q, k, v = (t if shape_of(t)[:own] == whole else t.expand(*whole, *shape_of(t)[own:]) for t in (q, k, v))
    n = len(shape_of(q))
    if n != 4:
        lead = shape_of(q)[:-2]
        if n < 4:
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        else:
            q, k, v = (t.flatten(0, n - 4) for t in (q, k, v))
            if mask is not None and len(shape_of(mask)) > 3:
                mask = mask.expand([*lead, *shape_of(mask)[-2:]]).flatten(0, n - 4)
        found = F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=enable_gqa)
        return found.squeeze(0) if n < 4 else found.unflatten(0, lead[:-1])
    q, k, v = (with_whole(func, t, [3]) for t in (q, k, v))
    axis, over = _axis_of_rows(q, k, v, mask, p), 1
    if axis is not None:
        shapes = tuple(map(shape_of, (q, k, v)))
        over = heads_over(shapes, computed_in(local_of(q)).dtype, _positions(q), _positions(k), causal)
        if over == axis.size:
            return _by_heads(q, k, v, mask, causal, scale, axis)
    elif enable_gqa and shape_of(q)[1] != shape_of(k)[1]:
        k, v = (t.repeat_interleave(shape_of(q)[1] // shape_of(k)[1], 1) for t in (k, v))
    rows_first = _rows_first(q)
    q, k = in_order(q, 2), in_order(k, 2)
    of_q, of_k, rest = splits_of(q).at(2), splits_of(k).at(2), splits_of(q).without(2)
    if of_k is not None and (rest.on(of_k.axis) or (of_q and of_q.axis is not of_k.axis)):
        # the axis shards samples or heads of the queries, or another axis shards their rows
        of_k = None
    k, v = (redistribute(t, Splits.of([*rest, of_k] if of_k else list(rest))) for t in (k, v))
    if p or (mask is not None and mask.requires_grad):
        return _with_weights(q, k, v, mask, p, causal, scale)
    if of_q is None and of_k is None:
        return by_rule(func, q, k, v, mask, 0.0, causal, scale=scale)
    if shape_of(q)[3] != shape_of(v)[3]:
        # the kernel requires equally many features of keys and values; padding by zeros changes neither
        most = max(shape_of(q)[3], shape_of(v)[3])
        q, k, w = (F.pad(t, (0, most - shape_of(t)[3])) for t in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, w, mask, 0.0, causal, scale=scale, enable_gqa=enable_gqa)
        return found[..., : shape_of(v)[3]]
    if mask is not None:
        # local rows, heads and samples, and all columns; in a grid the rows of a group come later
        mask = mask.view([*[1] * (4 - len(shape_of(mask))), *shape_of(mask)])
        whole_dims = [d for d, m in enumerate(shape_of(mask)) if m == 1 or (d == 2 and over > 1)]
        mask = part_in(mask, splits_of(q).without(*whole_dims))
    # the kernel requires contiguous features of a head
    parts = [computed_in(local_of(t)) for t in (q, k, v)]
    a, b, c = (part if part.stride(3) == 1 else part.contiguous() for part in parts)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(a.dtype)
    rows = range(shape_of(q)[2]) if of_q is None else of_q.owners.spans[of_q.axis.rank][0]
    if of_q is None or of_k is None:
        seen = mask
        if causal:
            columns = torch.arange(shape_of(k)[2], device=a.device)
            seen = columns <= torch.arange(rows.start, rows.stop, device=a.device)[:, None]
        if of_k is None:
            found = F.scaled_dot_product_attention(a, b, c, seen, scale=scale)
        else:
            if seen is not None and seen.shape[-1] != 1:
                seen = own_part(seen, seen.dim() - 1, of_k.owners, of_k.axis.rank)
            found = _SplitColumns.apply(a, b, c, seen, scale, of_k.axis)
        return wrap(found, splits_of(q))
    found = grid_attention(
        *(a, b, c),
        over=over,
        axis=of_q.axis,
        rows=_positions(q),
        columns=_positions(k),
        scale=scale,
        mask=mask,
        causal=causal,
    )
    if over > 1 and not rows_first:
        # a grid returns rows first; a copy, for dims of size 1 get the strides that they have in a plain tensor
        found = found.clone(memory_format=torch.contiguous_format)
    return wrap(found, splits_of(q))


def _rows_first(x: Tensor) -> bool:
    """Whether rows come before heads in memory; kernels return tensors with the memory order of the queries."""
    return held_by(x).stride(1) < held_by(x).stride(2)


def _positions(x: Tensor) -> tuple[range, ...]:
    """Return the rows of each rank, if they are in the order of the ranks."""
    split = splits_of(x).at(2)
    assert split is not None, "rows are sharded"
    return tuple(range(*ends) for ends in pairwise([0, *accumulate(split.owners.counts)]))


def _axis_of_rows(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float) -> MeshAxis | None:
    """Return the axis that shards the rows of queries, keys and values, if its ranks can have whole heads."""
    rows = [splits_of(t).at(2) for t in (q, k, v)]
    axes = {split.axis for split in rows if split is not None}
    if None in rows or len(axes) != 1 or p or any(splits_of(t).at(1) is not None for t in (q, k, v)):
        return None
    axis = axes.pop()
    if mask is not None and (mask.requires_grad or splits_of(mask).on(axis) is not None):
        return None
    return axis


def _by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: float, axis: MeshAxis) -> Tensor:
    """Attention of whole samples, of which each rank has some heads; rows are returned to their owners."""
    own, heads, rows_first = splits_of(q), shape_of(q)[1], _rows_first(q)
    groups = heads // shape_of(k)[1]
    if groups > 1 and (heads % axis.size or shape_of(k)[1] % axis.size):
        # a rank's queries would read heads of keys that another rank has
        k, v, groups = *(t.repeat_interleave(groups, 1) for t in (k, v)), 1

    def with_heads(x: Tensor) -> Tensor:
        split = Split(axis, 1, Owners.even(shape_of(x)[1], axis.size))
        return redistribute(x, splits_of(x).replaced(axis, split))

    q, k, v = map(with_heads, (q, k, v))
    if mask is not None:
        mask = mask.view([*[1] * (4 - len(shape_of(mask))), *shape_of(mask)])
        mask = part_in(mask, splits_of(q).without(*[d for d, m in enumerate(shape_of(mask)) if m == 1]))
    a, b, c = (computed_in(local_of(t)) for t in (q, k, v))
    found = F.scaled_dot_product_attention(a, b, c, mask, 0.0, causal, scale=scale, enable_gqa=groups > 1)
    if not rows_first:
        local = local_of(redistribute(wrap(found, splits_of(q)), own))
        # one sample gets the stride that it has in a plain tensor
        return wrap(local.flatten(0, 1).unflatten(0, local.shape[:2]), own)
    of_heads, of_rows = (splits.mapped(lambda dim: {1: 2, 2: 1}.get(dim, dim)) for splits in (splits_of(q), own))
    return redistribute(wrap(found.transpose(1, 2), of_heads), of_rows).transpose(1, 2)


def _with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float) -> Tensor:
    """Attention that computes all scores of the local rows, for dropout and for trained masks."""
    scores = torch.matmul(q, k.mT) * scale
    if causal:
        mask = torch.ones(shape_of(scores)[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        # as in torch, fully masked rows have weights and gradients of zero
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    if p:
        rest = 1 / (1 - p) if p < 1 else 0.0
        keep = kept(shape_of(weights), splits_of(weights), p, local_of(q).device)
        weights = wrap(local_of(weights) * keep * rest, splits_of(weights))
    return torch.matmul(weights, v)
