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
from torch import Tensor
from torch.autograd.function import once_differentiable

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
from lightning_amp.dist.splits import MeshAxis, Split, Splits

aten = torch.ops.aten
_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_ON_CPU_BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of one block and its `log_sums`; of rows that see nothing 0 and minus infinity.

    Args:
        mask: Added to the scores; of booleans true where a row sees a column.
    """
    bias = _additive(mask, q.dtype)
    if q.device.type == "cpu":
        out, log_sums = _ON_CPU(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        out, log_sums = _in_plain_operators(q, k, v, bias, causal, scale)
    log_sums = log_sums.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if bias is None:
        return out, log_sums
    blind = (bias == -math.inf).all(-1).expand(log_sums.shape)
    return out.masked_fill(blind[..., None], 0), log_sums.masked_fill(blind, -math.inf)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _in_plain_operators(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-1, -2)).float() * (scale or q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    log_sums = scores.logsumexp(-1)
    weights = (scores - log_sums[..., None]).exp().nan_to_num(0)
    return weights.to(v.dtype) @ v, log_sums


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the gradients of its queries, keys and values.

    Args:
        out, log_sums: Of all blocks.
    """
    bias = _additive(mask, q.dtype)
    if q.device.type == "cpu":
        return _ON_CPU_BACK(grad, q, k, v, out, log_sums, 0.0, causal, attn_mask=bias, scale=scale)
    factor = scale or q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2)).float() * factor
    scores = scores if bias is None else scores + bias
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    weights = (scores - log_sums[..., None]).exp().nan_to_num(0)
    inner = weights * ((grad @ v.transpose(-1, -2)).float() - (grad * out).sum(-1, keepdim=True).float())
    inner = inner.to(q.dtype) * factor
    return inner @ k, inner.transpose(-1, -2) @ q, weights.to(grad.dtype).transpose(-1, -2) @ grad


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
        scale: float | None,
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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, axis: MeshAxis
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
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    n = len(shape_of(q))
    row = n - 2
    over = {s.axis for t in (q, k, v) for s in splits_of(t) if s.dim == row}
    feature = next((t for t in (q, k, v) if splits_of(t).at(n - 1)), None)
    if feature is not None:
        raise shard_error(func, (q, k, v), "features of a head are split", remedy="split whole heads")
    if enable_gqa and shape_of(q)[-3] != shape_of(k)[-3]:
        times = shape_of(q)[-3] // shape_of(k)[-3]
        k, v = (torch.repeat_interleave(t, times, n - 3) for t in (k, v))
    if not over:
        return _without_rows(func, q, k, v, mask, dropout_p, is_causal, scale)
    if len(over) > 1:
        raise shard_error(func, (q, k, v), "rows and columns are split over several axes")
    axis = over.pop()
    if n == 3:
        mask = mask if mask is None or len(shape_of(mask)) < 3 else mask.unsqueeze(1)
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        found = _attention(func, q, k, v, mask, dropout_p, is_causal, scale=scale)
        return found.squeeze(1)
    q, k, v = (in_order(t, row) for t in (q, k, v))
    rest = Splits.of([s for s in splits_of(q) if s.dim < row])
    of_q, of_k = splits_of(q).at(row), splits_of(k).at(row)
    k, v = (redistribute(t, Splits.of([*rest, of_k] if of_k else rest)) for t in (k, v))
    if mask is not None:
        mask = _mask_of(mask, n, rest, of_q)
    if dropout_p or (mask is not None and mask.requires_grad):
        return _with_weights(q, k, v, mask, dropout_p, is_causal, scale, of_q, axis)
    scale, n_values = scale or shape_of(q)[-1] ** -0.5, shape_of(v)[-1]
    most = max(shape_of(q)[-1], n_values)
    if shape_of(q)[-1] != n_values:
        # the kernel wants as many features of values as of keys: zeros change neither
        q, k, v = (torch.nn.functional.pad(t, (0, most - shape_of(t)[-1])) for t in (q, k, v))
        found = _attention(func, q, k, v, mask, dropout_p, is_causal, scale=scale)
        return found[..., :n_values]
    a, b, c = (computed_in(local_of(t)) for t in (q, k, v))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(a.dtype)
    if of_q is None:
        assert of_k is not None, "rows or columns are split"
        if is_causal:
            mask = torch.ones(shape_of(q)[row], shape_of(k)[row], dtype=torch.bool, device=a.device).tril()
        if mask is not None and mask.shape[-1] != 1:
            mask = own_part(mask, mask.dim() - 1, of_k.owners, axis.rank)
        found = _SplitColumns.apply(a, b, c, mask, scale, axis)
        return wrap(found, rest)
    rows = [spans[0] for spans in of_q.owners.spans]
    if of_k is None:
        how = _seen(mask, is_causal, rows[axis.rank], range(shape_of(k)[row]), a.device)
        seen = how[1]
        if how[0] or (is_causal and seen is None):
            own = torch.arange(rows[axis.rank].start, rows[axis.rank].stop, device=a.device)[:, None]
            seen = torch.arange(shape_of(k)[row], device=a.device)[None] <= own
        found = torch.nn.functional.scaled_dot_product_attention(a, b, c, seen, scale=scale)
        return wrap(found, splits_of(q))
    columns = [spans[0] for spans in of_k.owners.spans]
    found = _Ring.apply(a, b, c, mask, is_causal, scale, axis, rows, columns)
    return wrap(found, splits_of(q))


def _mask_of(mask: Tensor, n: int, rest: Splits, of_q: Split | None) -> Tensor:
    """The part of a mask for own rows, all columns, own heads and samples."""
    offset = n - len(shape_of(mask))
    splits = [s for s in (*rest, *([of_q] if of_q else [])) if s.dim >= offset]
    own = [s._replace(dim=s.dim - offset) for s in splits if shape_of(mask)[s.dim - offset] == s.owners.n]
    return part_in(mask, Splits.of(own))


def _without_rows(
    func: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Samples or heads are split, and nothing else."""
    if p:
        return _with_weights(q, k, v, mask, p, causal, scale, None, None)
    splits = next(splits_of(t) for t in (q, k, v) if splits_of(t))
    k, v, q = (redistribute(t, splits) for t in (k, v, q))
    own = None if mask is None else _mask_of(mask, len(shape_of(q)), splits, None)
    return wrap(func(local_of(q), local_of(k), local_of(v), own, 0.0, causal, scale=scale), splits)


def _with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    of_q: Split | None,
    axis: MeshAxis | None,
) -> Tensor:
    """Scores of own rows are made, for dropout of weights and for masks that are trained; columns are gathered."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * (scale or shape_of(q)[-1] ** -0.5)
    if causal:
        seen = torch.ones(shape_of(scores)[-2:], dtype=torch.bool, device=local_of(q).device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    elif mask is not None:
        part = local_of(scores)
        part = part.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else part + mask
        scores = wrap(part, splits_of(scores))
    weights = torch.softmax(scores, -1)
    if p:
        keep = kept(shape_of(weights), splits_of(weights), p, local_of(q).device)
        weights = wrap(local_of(weights) * keep / (1 - p), splits_of(weights))
    return torch.matmul(weights, v)
