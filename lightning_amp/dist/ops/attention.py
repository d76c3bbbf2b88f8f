"""Attention whose queries, keys and values are split along the sequence: blocks travel a ring of ranks.

A rank keeps its queries. Keys and values of one rank after the other pass by, and results of blocks are merged by the
logarithms of their sums of exponentials (Liu, Zaharia and Abbeel, Ring Attention, 2023). Backward, a block's kernel is
given the output and the logarithms of all blocks, and yields that block's share; gradients of keys and values travel
on with their block and end where they belong.

Legend: `log_sums` are the logarithms of the sums of exponentials, [batch, head, row].
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp._torch import attend_on_cpu, attend_on_cpu_back
from lightning_amp.dist.by_rule import by_rule, with_whole
from lightning_amp.dist.collectives import reduce_now, ring
from lightning_amp.dist.ops.random import kept
from lightning_amp.dist.redistribute import own_part
from lightning_amp.dist.registry import operator, shard_error
from lightning_amp.dist.sharded_tensor import (
    computed_in,
    in_order,
    local_of,
    part_in,
    redistribute,
    shape_of,
    splits_of,
    wrap,
)
from lightning_amp.dist.splits import MeshAxis, Splits


KERNELS = ("cpu",)
"""Kinds of devices on which torch has a kernel that returns `log_sums`; elsewhere they are written out."""


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one block and its `log_sums`; of rows that see nothing 0 and minus infinity.

    Args:
        mask: Added to the scores; of booleans true where a row sees a column.
    """
    bias = _additive(mask, q.dtype)
    if q.device.type in KERNELS:
        out, log_sums = attend_on_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        scores = _scores(q, k, bias, causal, scale)
        log_sums = scores.logsumexp(-1)
        out = (scores - log_sums[..., None]).exp().nan_to_num(0).to(v.dtype) @ v
    log_sums = log_sums.to(_wide(q))
    if bias is None:
        return out, log_sums
    blind = (bias == -math.inf).all(-1).expand(log_sums.shape)
    return out.masked_fill(blind[..., None], 0), log_sums.masked_fill(blind, -math.inf)


def _wide(x: Tensor) -> torch.dtype:
    """The type that scores are added up in."""
    return torch.promote_types(x.dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.mT).to(_wide(q)) * scale
    scores = scores if bias is None else scores + bias
    if not causal:
        return scores
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, -math.inf)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the gradients of its queries, keys and values.

    Args:
        out, log_sums: Of all blocks.
    """
    bias = _additive(mask, q.dtype)
    if q.device.type in KERNELS:
        return attend_on_cpu_back(grad, q, k, v, out, log_sums, 0.0, causal, attn_mask=bias, scale=scale)
    weights = (_scores(q, k, bias, causal, scale) - log_sums[..., None]).exp().nan_to_num(0)
    inner = weights * ((grad @ v.mT) - (grad * out).sum(-1, keepdim=True)).to(_wide(q))
    inner = inner.to(q.dtype) * scale
    return inner @ k, inner.mT @ q, weights.to(grad.dtype).mT @ grad


def _seen(mask: Tensor | None, causal: bool, rows: range, columns: range, device: Any) -> Any:
    """How rows see a block of columns: (whether the kernel is causal, mask); None where they see nothing of it."""
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
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        axis: MeshAxis,
        rows: Sequence[range],
        columns: Sequence[range],
    ) -> Tensor:
        out: Tensor | None = None
        log_sums = q.new_empty(0)
        held = [k, v]
        for step in range(axis.size):
            at = (axis.rank - step) % axis.size
            arrive = None
            if step + 1 < axis.size:
                n = len(columns[(at - 1) % axis.size])
                # sent while this block is computed
                arrive = ring(held, [_with_rows(t, n) for t in (k, v)], axis)
            how = _seen(mask, causal, rows[axis.rank], columns[at], q.device)
            if how is not None:
                found, own = block_forward(q, held[0], held[1], how[1], how[0], scale)
                out, log_sums = (found, own) if out is None else _merged(out, log_sums, found, own)
            if arrive is not None:
                held = arrive()
        if out is None:
            out, log_sums = torch.zeros_like(q[..., : v.shape[-1]]), q.new_full(q.shape[:3], -math.inf)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, log_sums)
        ctx.of = causal, scale, axis, rows, columns
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, log_sums = ctx.saved_tensors
        causal, scale, axis, rows, columns = ctx.of
        grad, of_q = grad.contiguous(), torch.zeros_like(q)
        held = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for step in range(axis.size):
            at = (axis.rank - step) % axis.size
            how = _seen(mask, causal, rows[axis.rank], columns[at], q.device)
            if how is not None:
                a, b, c = block_backward(grad, q, held[0], held[1], out, log_sums, how[1], how[0], scale)
                of_q += a
                held[2] += b
                held[3] += c
            n = len(columns[(at - 1) % axis.size])
            if step + 1 == axis.size:
                # home again: only gradients are needed
                held = [k, v, *ring(held[2:], [_with_rows(t, n) for t in (k, v)], axis)()]
            else:
                held = ring(held, [_with_rows(t, n) for t in (k, v, k, v)], axis)()
        return of_q, held[2], held[3], None, None, None, None, None, None


def _with_rows(x: Tensor, n: int) -> list[int]:
    return [*x.shape[:2], n, x.shape[3]]


def _merged(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks' results as one."""
    both = torch.logaddexp(of_a, of_b)
    share_a, share_b = ((own - both).exp().nan_to_num(0)[..., None] for own in (of_a, of_b))
    return a * share_a + b * share_b, both


class _SplitColumns(torch.autograd.Function):
    """Whole queries, split keys and values: every rank's result, merged over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, axis: MeshAxis
    ) -> Tensor:
        found, own = block_forward(q, k, v, mask, False, scale)
        top = reduce_now(own, axis, torch.distributed.ReduceOp.MAX)
        top = torch.where(torch.isfinite(top), top, 0)
        share = (own - top).exp()
        total = reduce_now(share, axis)
        out = reduce_now(found * (share / total)[..., None].nan_to_num(0), axis).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, total.log() + top)
        ctx.of = scale, axis
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, log_sums = ctx.saved_tensors
        scale, axis = ctx.of
        grad = reduce_now(grad, axis)
        return (*block_backward(grad, q, k, v, out, log_sums, mask, False, scale), None, None, None)


@operator("scaled_dot_product_attention")
def _attention(
    func: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    p: float,
    causal: bool,
    *,
    scale: Any,
    enable_gqa: bool,
) -> Any:
    n, scale = len(shape_of(q)), shape_of(q)[-1] ** -0.5 if scale is None else scale
    if causal and mask is not None:
        raise shard_error(
            func, [q, k, v, mask], "it has a mask and is causal", remedy="put both into the mask"
        )
    if n != 4:
        return _with_four_dims(func, q, k, v, mask, p, causal, scale, enable_gqa)
    q, k, v = (with_whole(func, t, [3]) for t in (q, k, v))
    if enable_gqa and shape_of(q)[1] != shape_of(k)[1]:
        k, v = (t.repeat_interleave(shape_of(q)[1] // shape_of(k)[1], 1) for t in (k, v))
    q, k = in_order(q, 2), in_order(k, 2)
    of_q, of_k, rest = splits_of(q).at(2), splits_of(k).at(2), splits_of(q).without(2)
    if of_k is not None and (rest.on(of_k.axis) or (of_q and of_q.axis is not of_k.axis)):
        # the axis splits samples or heads of the queries, or they have another one for rows
        of_k = None
    k, v = (redistribute(t, Splits.of([*rest, of_k] if of_k else list(rest))) for t in (k, v))
    if p or (mask is not None and mask.requires_grad):
        return _with_weights(q, k, v, mask, p, causal, scale)
    if of_q is None and of_k is None:
        return by_rule(func, q, k, v, mask, 0.0, causal, scale=scale)
    if shape_of(q)[3] != shape_of(v)[3]:
        # the kernel wants as many features of values as of keys: zeros change neither
        most = max(shape_of(q)[3], shape_of(v)[3])
        q, k, w = (F.pad(t, (0, most - shape_of(t)[3])) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, w, mask, 0.0, causal, scale=scale)[..., : shape_of(v)[3]]
    mask = None if mask is None else _mask_of(mask, splits_of(q))
    # the kernel reads the features of a head as they lie in memory
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
    every_row, every_column = ([own for (own,) in s.owners.spans] for s in (of_q, of_k))
    found = _Ring.apply(a, b, c, mask, causal, scale, of_q.axis, every_row, every_column)
    return wrap(found, splits_of(q))


def _with_four_dims(
    func: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    gqa: bool,
) -> Tensor:
    lead = shape_of(q)[:-2]
    if len(lead) < 2:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    else:
        q, k, v = (t.flatten(0, len(lead) - 2) for t in (q, k, v))
        if mask is not None and len(shape_of(mask)) > 3:
            mask = mask.expand([*lead, *shape_of(mask)[-2:]]).flatten(0, len(lead) - 2)
    found = F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=gqa)
    return found.squeeze(0) if len(lead) < 2 else found.unflatten(0, lead[:-1])


def _mask_of(mask: Tensor, splits: Splits) -> Tensor:
    """The part of a mask for own rows, all columns, own heads and samples."""
    mask = mask.view([*[1] * (4 - len(shape_of(mask))), *shape_of(mask)])
    return part_in(mask, splits.without(*[d for d, n in enumerate(shape_of(mask)) if n == 1]))


def _with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float
) -> Tensor:
    """Scores of own rows are made, for dropout of weights and for masks that are trained; columns are gathered."""
    scores = torch.matmul(q, k.mT) * scale
    if causal:
        mask = torch.ones(shape_of(scores)[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    if p:
        rest = 1 / (1 - p) if p < 1 else 0.0
        keep = kept(shape_of(weights), splits_of(weights), p, local_of(q).device)
        weights = wrap(local_of(weights) * keep * rest, splits_of(weights))
    return torch.matmul(weights, v)
