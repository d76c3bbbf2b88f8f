"""Call torch's fused kernels for one block of attention, with the sums and results of all blocks in the backward pass.

The operators are called by name: the public function returns no sums, and its backward pass reads its own. What the
public function does around them is done here:

    all on CUDA    rows of a multiple of 8 features, filled with zeros; strides of a multiple of 8
    efficient      a bias [batch, head, row, column] whose rows begin at a multiple of 16 columns; logarithms of
                   a multiple of 32 rows, filled with infinity, but on AMD's devices of the rows alone
    backward       result and gradient with the memory order [batch, row, head, feature], whose strides the efficient
                   kernel does not read

Causal blocks begin with the same row and column. The flash kernel aligns their ends instead, so that it gets only those
of equally many rows and columns.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp._torch import (
    attend_on_cpu,
    attend_on_cpu_back,
    attend_on_cuda,
    attend_on_cuda_back,
    flash_on_cuda,
    flash_on_cuda_back,
)
from lightning_amp.sharding.attention.written_out import Block, additive

FEATURES, COLUMNS = 8, 16
"""Alignment of features and of a bias, in elements."""
ROWS = 1 if torch.version.hip else 32
"""Alignment of the efficient kernel's logarithms, in rows."""
Gradients = tuple[Tensor, Tensor, Tensor]


def cpu_forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return the result of a block and the logarithms of its sums, by the flash kernel for CPUs."""
    q, k, v, mask, causal, scale = block
    out, log_sums = attend_on_cpu(q, k, v, 0.0, causal, attn_mask=additive(mask, q.dtype), scale=scale)
    return out, log_sums


def cpu_backward(block: Block, grad: Tensor, out: Tensor, log_sums: Tensor) -> Gradients:
    """Return the gradients of queries, keys and values, by the flash kernel for CPUs."""
    q, k, v, mask, causal, scale = block
    bias = additive(mask, q.dtype)
    of_q, of_k, of_v = attend_on_cpu_back(grad, q, k, v, out, log_sums, 0.0, causal, attn_mask=bias, scale=scale)
    return of_q, of_k, of_v


def flash_forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return the result of a block and the logarithms of its sums, by the flash kernel for CUDA."""
    q, k, v, _, causal, scale = block
    out, log_sums, *_ = flash_on_cuda(*map(_aligned, (q, k, v)), 0.0, causal, scale=scale)
    return out.narrow(3, 0, q.shape[3]), log_sums


def flash_backward(block: Block, grad: Tensor, out: Tensor, log_sums: Tensor) -> Gradients:
    """Return the gradients of queries, keys and values, by the flash kernel for CUDA."""
    q, k, v, _, causal, scale = block
    seed = _no_dropout(q)
    given = (*map(_aligned, (q, k, v)), _rows_first(out), log_sums.contiguous())
    sizes = q.shape[2], k.shape[2]
    found = flash_on_cuda_back(_rows_first(grad), *given, None, None, *sizes, 0.0, causal, seed, seed, scale=scale)
    of_q, of_k, of_v = (x.narrow(3, 0, q.shape[3]) for x in found)
    return of_q, of_k, of_v


def efficient_forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return the result of a block and the logarithms of its sums, by the memory-efficient kernel for CUDA."""
    q, k, v, mask, causal, scale = block
    bias = _bias(mask, q, k)
    out, log_sums, *_ = attend_on_cuda(*map(_aligned, (q, k, v)), bias, True, 0.0, causal, scale=scale)
    return out.narrow(3, 0, q.shape[3]), log_sums.narrow(2, 0, q.shape[2])


def efficient_backward(block: Block, grad: Tensor, out: Tensor, log_sums: Tensor) -> Gradients:
    """Return the gradients of queries, keys and values, by the memory-efficient kernel for CUDA."""
    q, k, v, mask, causal, scale = block
    seed, bias, wanted = _no_dropout(q), _bias(mask, q, k), [True, True, True, False]
    # as in the forward pass: a row that is not there has no weight
    log_sums = F.pad(log_sums, (0, -log_sums.shape[2] % ROWS), value=math.inf).contiguous()
    given = (*map(_aligned, (q, k, v)), bias, _rows_first(out), log_sums)
    found = attend_on_cuda_back(_rows_first(grad), *given, seed, seed, 0.0, wanted, causal, scale=scale)
    of_q, of_k, of_v = (x.narrow(3, 0, q.shape[3]) for x in found[:3])
    return of_q, of_k, of_v


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor whose features and rows begin at multiples of `FEATURES`."""
    if any(n % FEATURES for n in (x.shape[3], x.storage_offset(), *x.stride()[:3])) or x.stride(3) != 1:
        return _rows_first(x)
    return x


def _rows_first(x: Tensor) -> Tensor:
    """Return a tensor [batch, head, row, feature] with the memory order [batch, row, head, aligned feature]."""
    rows = x.transpose(1, 2)
    return (F.pad(rows, (0, -x.shape[3] % FEATURES)) if x.shape[3] % FEATURES else rows.contiguous()).transpose(1, 2)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask as an aligned bias; dims of size 1 are not copied."""
    if mask is None:
        return None
    mask = mask.view([*[1] * (4 - mask.dim()), *mask.shape])
    n = k.shape[2]
    bias = q.new_zeros([*mask.shape[:3], -(-n // COLUMNS) * COLUMNS]).narrow(3, 0, n)
    bias = bias.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else bias.copy_(mask)
    return bias.expand(*q.shape[:3], n)


def _no_dropout(like: Tensor) -> Tensor:
    """Return a state of the random numbers, which no kernel reads without dropout."""
    return like.new_zeros((), dtype=torch.int64)
