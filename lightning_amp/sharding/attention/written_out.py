"""Compute a block of attention from its scores, a part of the rows at a time: for any device, dtype and mask."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST_SCORES = 2**24
"""Most scores in memory at a time."""


class Block(NamedTuple):
    """One block of attention.

    Attributes:
        q, k, v: [batch, head, row, dim]; all have the same dim.
        mask: Mask that is added to the scores; a boolean mask is True where attended.
        causal: Whether row i attends to columns up to i; there is no mask then.
        scale: Factor of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


def forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return the result of a block, and the logarithms of its sums of exponentials."""
    q, k, v, *_, scale = block
    parts = list[tuple[Tensor, Tensor]]()
    for rows, bias in _runs(block):
        scores = _scores(q[..., rows, :], k, bias, scale)
        sums = scores.logsumexp(-1)
        parts.append(((scores - finite(sums)[..., None]).exp().to(v.dtype) @ v, sums))
    out, log_sums = (torch.cat(made, 2) for made in zip(*parts, strict=True))
    return out, log_sums


def backward(block: Block, grad: Tensor, out: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a block's queries, keys and values; `out` and `log_sums` are those of all blocks."""
    q, k, v, *_, scale = block
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, bias in _runs(block):
        own, of_out = q[..., rows, :], grad[..., rows, :]
        # with the logarithms of all blocks, these are weights of the full row
        weights = (_scores(own, k, bias, scale) - log_sums[..., rows, None]).exp()
        along = (of_out * out[..., rows, :]).sum(-1, keepdim=True)
        inner = (weights * (of_out @ v.mT - along).to(weights.dtype)).to(q.dtype) * scale
        of_q[..., rows, :] = inner @ k
        of_k += inner.mT @ own
        of_v += weights.to(grad.dtype).mT @ of_out
    return of_q, of_k, of_v


def finite(log_sums: Tensor) -> Tensor:
    """Replace minus infinity, of fully masked rows, by zero; their weights are zero then."""
    # -inf - (-inf) is NaN; nan_to_num of the weights would hide NaN of the queries
    return log_sums.masked_fill(log_sums == -math.inf, 0)


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which scores are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that is added to scores; a boolean mask is True where attended."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _runs(block: Block) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield slices of rows with the bias of their scores."""
    q, k, _, mask, causal, _ = block
    n, columns = q.shape[-2], k.shape[-2]
    most = max(1, MOST_SCORES // max(1, math.prod(q.shape[:-2]) * columns))
    for first in range(0, max(1, n), most):
        rows = slice(first, min(first + most, n))
        seen = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        if causal:
            row, column = (torch.arange(*own, device=q.device) for own in ((rows.start, rows.stop), (columns,)))
            seen = column <= row[:, None]
        yield rows, additive(seen, q.dtype)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = (q @ k.mT).to(wide(q)) * scale
    return scores if bias is None else scores + bias
