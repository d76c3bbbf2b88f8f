"""Choose the kernel of a block of attention by device, dtype and mask, and compute blocks with it.

    device            dtype                       blocks                                kernel
    CPU               all                         all                                   flash, for CPUs
    CUDA              float16, bfloat16           no mask; causal: square               flash, for CUDA
    CUDA              float16, bfloat16, float32  all                                   memory-efficient
    others, float64                                                                     written out

Both CUDA kernels need capability 8.0; with less, only float16 and float32 have the second one. Blocks without rows or
columns are written out. Tensors without values choose as those of the target device, so that a plan has the bytes and
operators that run there. The first call of a CUDA kernel in each form is compared with the written-out block.

Legend: `log_sums` are logarithms of sums of exponentials, [batch, head, row].
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_amp._torch import has_no_values, multiplies_in_tf32, unseen
from lightning_amp.errors import ShardError
from lightning_amp.footprint.target_device import device_type_of
from lightning_amp.sharding.attention import fused, written_out
from lightning_amp.sharding.attention.written_out import Block, finite, wide


class BlockKernel(NamedTuple):
    """How a block is computed.

    Attributes:
        forward: Block -> (out, log_sums).
        backward: (block, grad, out, log_sums) -> gradients of q, k and v, where `out` and `log_sums` are those of all
            blocks.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


ON_CPU = BlockKernel("the flash kernel for CPUs", fused.cpu_forward, fused.cpu_backward)
FLASH = BlockKernel("the flash kernel", fused.flash_forward, fused.flash_backward)
EFFICIENT = BlockKernel("the memory-efficient kernel", fused.efficient_forward, fused.efficient_backward)
WRITTEN_OUT = BlockKernel("scores in memory", written_out.forward, written_out.backward)
HALF = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
"""Least compute capability of the flash kernel, and of bfloat16 in the other one."""
MOST_FEATURES = 256
"""Most features of a head in the flash kernel."""


def kernel_of(block: Block) -> BlockKernel:
    """Return the kernel that computes a block."""
    q, k, _, mask, causal, _ = block
    device = device_type_of(q) if has_no_values(q) else q.device.type
    if device in ("cpu", "meta"):
        return ON_CPU
    if device != "cuda" or q.dtype not in (*HALF, torch.float32) or 0 in (*q.shape, *k.shape):
        return WRITTEN_OUT
    newer = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= CAPABILITY
    square = not causal or q.shape[2] == k.shape[2]
    if newer and q.dtype in HALF and mask is None and square and q.shape[3] <= MOST_FEATURES:
        return FLASH
    return EFFICIENT if newer or q.dtype != torch.bfloat16 else WRITTEN_OUT


def block_forward(block: Block) -> tuple[Tensor, Tensor]:
    """Compute attention of one block and its `log_sums`; fully masked rows are 0 and minus infinity.

    Heads of its keys and values may be shared by several of its queries.

    Raises:
        ShardError: The first block of a CUDA kernel differs from the written-out one.
    """
    block = _of_all_heads(block)
    q, mask = block.q, block.mask
    kernel = kernel_of(block)
    if kernel in (FLASH, EFFICIENT) and not has_no_values(q):
        _check(kernel, q, masked=mask is not None, causal=block.causal)
    out, log_sums = kernel.forward(block)
    log_sums = log_sums.to(wide(q))
    if mask is None:
        return out, log_sums
    # the softmax of a fully masked row is NaN; as 0 with weight 0, it does not change the merged result
    blind = (~mask if mask.dtype == torch.bool else mask == -math.inf).all(-1).expand(log_sums.shape)
    return out.masked_fill(blind[..., None], 0), log_sums.masked_fill(blind, -math.inf)


def block_backward(block: Block, grad: Tensor, out: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's gradients of its queries, keys and values; `out` and `log_sums` are those of all blocks."""
    n, heads = block.k.shape[1], block.q.shape[1]
    of_q, of_k, of_v = kernel_of(block).backward(_of_all_heads(block), grad, out, finite(log_sums))
    if n != heads:
        of_k, of_v = (x.unflatten(1, (n, heads // n)).sum(2) for x in (of_k, of_v))
    return of_q, of_k, of_v


def _of_all_heads(block: Block) -> Block:
    """Return a block with as many heads of keys and values as of queries; each of theirs is that of as many."""
    k, v = block.k, block.v
    again = block.q.shape[1] // k.shape[1]
    return block if again == 1 else block._replace(k=k.repeat_interleave(again, 1), v=v.repeat_interleave(again, 1))


def merged(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results and `log_sums` of two blocks."""
    # no weight exceeds 1, so that large scores do not overflow
    both = torch.logaddexp(of_a, of_b)
    share_a, share_b = ((own - finite(both)).exp()[..., None] for own in (of_a, of_b))
    return a * share_a + b * share_b, both


_CHECKED = set[tuple[object, ...]]()
ROUNDING = {torch.float16: 2**-8, torch.bfloat16: 2**-5, torch.float32: 2**-16}
"""Largest difference that is rounding, relative to the norm of a tensor."""
TF32 = 2**-8


def _check(kernel: BlockKernel, like: Tensor, *, masked: bool, causal: bool) -> None:
    """Compare a small block of a kernel with the written-out one, once in a process for each form and device.

    Raises:
        ShardError: They differ by more than rounding.
    """
    form = kernel.name, like.dtype, like.device, like.shape[3], masked, causal
    if form in _CHECKED:
        return
    with unseen(), torch.no_grad():
        error = difference(kernel, like.dtype, like.device, like.shape[3], masked=masked, causal=causal)
    allowed = TF32 if like.dtype == torch.float32 and multiplies_in_tf32() else ROUNDING[like.dtype]
    if not error <= allowed:
        raise ShardError(
            f"{kernel.name} of torch {torch.__version__!r} differs by {error:.1e} from attention written out, for"
            f" {like.dtype!r}, {like.shape[3]!r} features, masked={masked!r}, causal={causal!r} on {like.device!r};"
            f" allowed is rounding, {allowed:.1e}: leave sequence out, or install another torch"
        )
    _CHECKED.add(form)


def difference(
    kernel: BlockKernel, dtype: torch.dtype, device: torch.device, dim: int, *, masked: bool, causal: bool
) -> float:
    """Return the largest relative error of a kernel on a small block, of result, sums and all gradients."""
    n, columns, scale, generator = 40, 40 if causal else 33, dim**-0.5, torch.Generator().manual_seed(0)

    def drawn(rows: int) -> Tensor:
        # the memory order of a projection's heads
        return torch.randn(2, rows, 3, dim, generator=generator).to(device, dtype).transpose(1, 2)

    q, k, v, grad = drawn(n), drawn(columns), drawn(columns), drawn(n)
    mask = None
    if masked:
        mask = (torch.rand(2, 1, n, columns, generator=generator) < 0.7).to(device)
        # a row without a column is the caller's to handle
        mask[..., 0] = True
    block = Block(q, k, v, mask, causal, scale)
    wider = block._replace(q=q.double(), k=k.double(), v=v.double())
    exact_out, exact_sums = written_out.forward(wider)
    # other blocks have as much weight, and another result
    out, log_sums = (exact_out / 2).to(dtype), exact_sums + math.log(2)
    exact = written_out.backward(wider, grad.double(), out.double(), log_sums)
    found = *kernel.forward(block), *kernel.backward(block, grad, out, log_sums.to(wide(q)))
    pairs = zip(found, (exact_out, exact_sums, *exact), strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
