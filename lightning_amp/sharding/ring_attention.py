"""Ring attention: attention over sequence-sharded queries, keys and values, whose blocks are passed around the ranks.

Each rank keeps its queries. Keys and values are passed from rank to rank, and the results of blocks are merged by the
logarithms of their sums of exponentials (Liu, Zaharia and Abbeel, Ring Attention, 2023). In the backward pass, a
block's kernel receives the output and the logarithms of all blocks, and returns the gradients of that block. Gradients
of keys and values are passed on with their block, and end at the block's owner.

Collectives: R - 1 ring steps in the forward pass with keys and values; in the backward pass R - 1 with these, and R
with their gradients. All but the last overlap with the computation of a block.

Legend: `log_sums` are logarithms of sums of exponentials, [batch, head, row]; R ranks.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_amp._torch import attend_on_cpu, attend_on_cpu_back
from lightning_amp.derivatives import first_only
from lightning_amp.sharding._torch import never_compiled
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
) -> Tensor:
    """Compute attention of this rank's queries to the keys and values of all ranks.

    Args:
        q, k, v: Local shards, [batch, head, row, dim]; keys and values have the same dim.
        rows, columns: Positions of every rank's queries, and of its keys and values.
        mask: Mask of the local queries and all columns, added to the scores; a boolean mask is True where attended.
        causal: Whether a row attends to no later columns.
    """
    return cast(Tensor, _Ring.apply(q, k, v, mask, causal, scale, axis, rows, columns))


ON_CPU = ("cpu", "meta")
"""Device types that use the CPU kernel; meta tensors take the bytes that it needs."""
MOST_SCORES = 2**24
"""Most scores of a block in memory at a time on other devices."""


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of one block and its `log_sums`; fully masked rows are 0 and minus infinity.

    A mask is added to the scores; a boolean mask is True where attended.
    """
    bias = _additive(mask, q.dtype)
    if q.device.type in ON_CPU:
        out, log_sums = attend_on_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        parts = list[tuple[Tensor, Tensor]]()
        for rows, seen in _runs(q, k, bias, causal):
            scores = _scores(q[..., rows, :], k, seen, scale)
            sums = scores.logsumexp(-1)
            parts.append(((scores - _no_infinity(sums)[..., None]).exp().to(v.dtype) @ v, sums))
        out, log_sums = (torch.cat(made, 2) for made in zip(*parts, strict=True))
    log_sums = log_sums.to(_wide(q))
    if bias is None:
        return out, log_sums
    # the softmax of a fully masked row is NaN; as 0 with weight 0, it does not change the merged result
    blind = (bias == -math.inf).all(-1).expand(log_sums.shape)
    return out.masked_fill(blind[..., None], 0), log_sums.masked_fill(blind, -math.inf)


def _no_infinity(log_sums: Tensor) -> Tensor:
    """Replace minus infinity, of fully masked rows, by zero; their weights are zero then."""
    # -inf - (-inf) is NaN; nan_to_num of the weights would hide NaN of the queries
    return log_sums.masked_fill(log_sums == -math.inf, 0)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which scores are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _runs(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield slices of rows with the bias of their scores; a causal block has no mask."""
    n, columns = q.shape[-2], k.shape[-2]
    most = max(1, MOST_SCORES // max(1, math.prod(q.shape[:-2]) * columns))
    for first in range(0, max(1, n), most):
        rows = slice(first, min(first + most, n))
        if causal:
            row, column = (torch.arange(*own, device=q.device) for own in ((rows.start, rows.stop), (columns,)))
            yield rows, _additive(column <= row[:, None], q.dtype)
        else:
            yield rows, bias if bias is None or bias.shape[-2] == 1 else bias[..., rows, :]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = (q @ k.mT).to(_wide(q)) * scale
    return scores if bias is None else scores + bias


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
    """Return a block's gradients of its queries, keys and values; `out` and `log_sums` are those of all blocks."""
    bias = _additive(mask, q.dtype)
    log_sums = _no_infinity(log_sums)
    if q.device.type in ON_CPU:
        return attend_on_cpu_back(grad, q, k, v, out, log_sums, 0.0, causal, attn_mask=bias, scale=scale)
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, seen in _runs(q, k, bias, causal):
        own, of_out = q[..., rows, :], grad[..., rows, :]
        # with the logarithms of all blocks, these are weights of the full row
        weights = (_scores(own, k, seen, scale) - log_sums[..., rows, None]).exp()
        along = (of_out * out[..., rows, :]).sum(-1, keepdim=True)
        inner = (weights * (of_out @ v.mT - along).to(_wide(q))).to(q.dtype) * scale
        of_q[..., rows, :] = inner @ k
        of_k += inner.mT @ own
        of_v += weights.to(grad.dtype).mT @ of_out
    return of_q, of_k, of_v


def _seen(mask: Tensor | None, causal: bool, rows: range, columns: range, device: Any) -> Any:
    """Return (whether the kernel is causal, mask) for a block of columns; None if all of it is masked."""
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
        causal, scale, axis, rows, columns = ctx.of = of
        out: Tensor | None = None
        log_sums = q.new_empty(0)
        held = [k, v]
        for step in range(axis.size):
            at = (axis.rank - step) % axis.size
            arrive = None
            if step + 1 < axis.size:
                n = len(columns[(at - 1) % axis.size])
                # overlaps with the computation of this block
                arrive = ring(held, [_with_rows(t, n) for t in (k, v)], axis)
            how = _seen(mask, causal, rows[axis.rank], columns[at], q.device)
            if how is not None:
                found, own = block_forward(q, held[0], held[1], how[1], how[0], scale)
                out, log_sums = (found, own) if out is None else _merged(out, log_sums, found, own)
            if arrive is not None:
                held = arrive()
        if out is None:
            # all columns are masked
            out, log_sums = torch.zeros_like(q[..., : v.shape[-1]]), q.new_full(q.shape[:3], -math.inf)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, log_sums)
        return out

    @staticmethod
    @first_only("attention over samples that are split over ranks; leave them whole")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, log_sums = ctx.saved_tensors
        causal, scale, axis, rows, columns = ctx.of
        grad, held = grad.contiguous(), [k, v]
        of_q: Tensor | None = None
        sums, arrive_sums = list[Tensor](), None
        for step in range(axis.size):
            at = (axis.rank - step) % axis.size
            shapes = [_with_rows(t, len(columns[(at - 1) % axis.size])) for t in (k, v)]
            # sends keys, values, and gradients of the previous block while this block is computed
            arrive = ring(held, shapes, axis) if step + 1 < axis.size else None
            how, found = _seen(mask, causal, rows[axis.rank], columns[at], q.device), list[Tensor]()
            if how is not None:
                found = [*block_backward(grad, q, held[0], held[1], out, log_sums, how[1], how[0], scale)]
            if arrive_sums is not None:
                sums = arrive_sums()
            if found:
                of_q = found[0] if of_q is None else of_q.add_(found[0])
                sums = [a.add_(b) for a, b in zip(sums, found[1:], strict=True)] if sums else found[1:]
                found.clear()
            elif not sums:
                sums = [torch.zeros_like(t) for t in held]
            # the last step returns gradients to the owners
            arrive_sums = ring(sums, shapes, axis)
            sums = []
            held = held if arrive is None else arrive()
        assert arrive_sums is not None, "there is a rank"
        of_k, of_v = arrive_sums()
        of_q = torch.zeros_like(q) if of_q is None else of_q
        return of_q, of_k, of_v, None, None, None, None, None, None


def _with_rows(x: Tensor, n: int) -> list[int]:
    return [*x.shape[:2], n, x.shape[3]]


def _merged(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of two blocks."""
    # no weight exceeds 1, so that large scores do not overflow
    both = torch.logaddexp(of_a, of_b)
    share_a, share_b = ((own - _no_infinity(both)).exp()[..., None] for own in (of_a, of_b))
    return a * share_a + b * share_b, both
