"""Multiplies sparse counts by a wide weight, [B, F] x [h, F]^T, a dense block of features at a time.

    y = sum over blocks of x[:, block] W[:, block]^T            dW[:, block] = dy^T x[:, block]

Exact: the dense product, summed block by block. Memory: one block of the dense [B, F] exists at a time, forward and
backward, and only the entries are saved for the backward pass. The gradient of the weight is dense, [h, F].

Blocks, and not a sparse product: at 2 % of entries, h 128 and F 172,800 the products of the blocks take the time of the
dense whole, and filling them in 8 % more. MKL's sparse products take 1.1 (B 256) to 1.9 times (B 64) as long, and make
a gradient [F, h] that has to be transposed (one core of a CPU).

Computed in the weight's type, also under autocast, and summed in float32 at least.

Legend: cell (B), feature (F), hidden (h).
Known limits: no gradient of the counts, no second derivative.
"""

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp.errors import DataError

BLOCK = 2**20
"""Numbers of a dense block; 4 MiB in float32."""


class Counts(Protocol):
    """Interface of sparse counts [B, F] that the product needs."""

    value: Tensor
    shape: tuple[int, int]

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> "Counts": ...

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The counts as a plain tensor."""


def product(x: Counts, weight: Float[Tensor, "hidden feature"]) -> Float[Tensor, "cell hidden"]:
    """x W^T; only the weight gets a gradient."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise DataError(
            f"sparse counts of {x.shape[1]!r} features were given to a layer whose weight has the shape"
            f" {tuple(weight.shape)!r}; use the data that the layer was made for"
        )
    if torch.is_grad_enabled() and x.value.requires_grad:
        raise DataError(
            "the gradient of sparse counts is not computed; detach what they are scaled by, or take"
            " x.to_dense()"
        )
    return cast(Tensor, _Product.apply(x, weight))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Counts, weight: Tensor) -> Tensor:
        ctx.x, ctx.dtype = x, weight.dtype
        total = weight.new_zeros(
            (len(x), len(weight)), dtype=torch.promote_types(weight.dtype, torch.float32)
        )
        with _without_autocast(weight):
            for block, counts in _blocks(x, weight.dtype):
                total += counts @ weight[:, block].T
        return total.to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        of_weight = grad.new_empty((grad.shape[1], ctx.x.shape[1]), dtype=ctx.dtype)
        with _without_autocast(grad):
            for block, counts in _blocks(ctx.x, ctx.dtype):
                torch.mm(grad.to(ctx.dtype).T, counts, out=of_weight[:, block])
        return None, of_weight


def _blocks(x: Counts, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    n = x.shape[1]
    step = max(1, BLOCK // max(len(x), 1))
    for first in range(0, n, step):
        block = slice(first, min(first + step, n))
        yield block, x[:, block].to_dense(dtype)


def _without_autocast(like: Tensor) -> torch.autocast:
    # the meta device has no autocast
    device = like.device.type
    return torch.autocast(device if torch.amp.is_autocast_available(device) else "cpu", enabled=False)
