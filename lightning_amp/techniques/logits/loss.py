"""Compute cross-entropy of a linear layer's outputs, and its gradients, in chunks of rows.

With x [n, d], weight [v, d] and targets [n], a chunk has about n d / v rows, so that its logits have as many entries
as x, and at least 32 (or d, if that is less), for products of few rows are slow; they have no more entries than the
weight. The forward pass keeps the loss of every row. The backward pass recomputes the logits of each chunk:

    grad x_i       = grad logits_i @ weight
    grad weight    = sum over chunks of grad logits_i^T @ x_i

Results differ from those with full logits only by the order of summation over chunks.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_amp.errors import ModelError
from lightning_amp.footprint.chain.block_call import autocast_again, autocast_now

WRITTEN = (
    "logits were read after the inputs or the weight of their layer had been changed in place, and with 'logits' their"
    " product would see the change; make the change out of place or after the loss, or leave 'logits' out"
)
After = Callable[[Tensor], Tensor]
LEAST_ROWS = 32
"""Rows of a chunk whose product is no slower per row than that of many."""
linear: Any = torch.ops.aten.linear.default
"""The operator, not `F.linear`, whose calls are deferred during the step."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Inputs of a linear layer, from which its outputs are computed in chunks of rows.

    Attributes:
        x: Input [..., d].
        weight, bias: [v, d], and [v] or None.
        dtype: Dtype of the product.
        casts: Whether autocast sets this dtype.
        after: Elementwise functions that are applied to the product.
        moved: Whether classes are dim 1 of the outputs.
        given: Tensors that the layer was called with, and their autograd versions.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    casts: bool = False
    after: tuple[After, ...] = ()
    moved: bool = False
    given: tuple[tuple[Tensor, int], ...] = ()

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> "Rows":
        """Make rows from the arguments of `F.linear`, under the current autocast."""
        on = [dtype for _, enabled, dtype in autocast_now((x.device.type,)) if enabled]
        to = on[0] if on and x.dtype != torch.float64 else None
        given = tuple((t, t._version) for t in (x, weight, bias) if t is not None)
        return cls(x=x, weight=weight, bias=bias, dtype=to or x.dtype, casts=to is not None, given=given)

    def check(self) -> None:
        """Raise ModelError if an input was changed in place since the layer was called."""
        if any(t._version != version for t, version in self.given):
            raise ModelError(WRITTEN)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.x.numel() // max(1, self.x.shape[-1])

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk, such that its outputs have as many entries as x, or at most as many as the weight."""
        return max(self.x.numel() // max(1, len(self.weight)), min(LEAST_ROWS, self.weight.shape[1]), 1)

    @property
    def requires_grad(self) -> bool:
        """Whether the product requires gradients."""
        return any(t is not None and t.requires_grad for t in (self.x, self.weight, self.bias))

    def product(self) -> Tensor:
        """Return the product, before elementwise functions."""
        self.check()
        with _autocast_to(self.x.device.type, self.dtype if self.casts else None):
            return cast(Tensor, linear(self.x, self.weight, self.bias))

    def detached(self) -> "Rows":
        """Return the rows without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, x=self.x.detach(), weight=self.weight.detach(), bias=bias)

    def chunks(self, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield rows of x and of other tensors, chunk by chunk."""
        flat = self.x.detach().reshape(-1, self.x.shape[-1])
        return zip(*(torch.split(t, self.chunk_rows) for t in (flat, *more)), strict=True)


def largest(rows: Rows) -> Tensor:
    """Return the index of the largest output of every row."""
    rows.check()
    with torch.no_grad():
        weight, bias = _computed_in(rows)
        found = [_outputs(rows, x, weight, bias).argmax(-1) for (x,) in rows.chunks()]
    return torch.cat(found).view(rows.x.shape[:-1])


def cross_entropy(
    rows: Rows,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute `F.cross_entropy` of the outputs; return None if the arguments are invalid or not supported."""
    known = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    if not known or not isinstance(target, Tensor) or target.requires_grad:
        return None
    if rows.x.dim() != (3 if rows.moved else 2):
        return None
    classes = not target.is_floating_point()
    if weight is not None and (weight.requires_grad or label_smoothing or not classes):
        return None
    if not classes and rows.moved:
        target = target.movedim(1, -1)
    shape = rows.x.shape[:-1]
    if target.shape != (shape if classes else (*shape, len(rows.weight))):
        return None
    rows.check()
    of_rows = target.reshape(-1) if classes else target.reshape(-1, len(rows.weight))
    loss = partial(
        F.cross_entropy, weight=weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    losses = cast(Tensor, _RowLosses.apply(rows.x, rows.weight, rows.bias, of_rows, rows, loss))  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(shape)
    # 16-bit types would lose the contributions of small losses
    sums = losses.float() if losses.dtype in (torch.float16, torch.bfloat16) else losses
    found = sums.sum()
    if reduction == "mean" and classes:
        counts = of_rows != ignore_index
        if weight is not None:
            # `ignore_index` is not an index of the weights, so it is replaced for the lookup
            counts = torch.where(counts, weight[of_rows.masked_fill(~counts, 0).long()], 0)
        found = found / counts.sum()
    elif reduction == "mean":
        found = found / rows.n_rows
    return found.to(losses.dtype)


class _RowLosses(torch.autograd.Function):
    """Loss of every row: x, weight, bias and targets -> [n]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: Rows, loss: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, target)
        # not `rows` itself, because its tensors are saved already
        ctx.loss, ctx.given = loss, (rows.dtype, rows.after)
        ctx.autocast = autocast_now((x.device.type,))
        of_weight, of_bias = _computed_in(rows)
        return torch.cat([loss(_outputs(rows, part, of_weight, of_bias), t) for part, t in rows.chunks(target)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target = ctx.saved_tensors
        dtype, after = ctx.given
        # `given` is not needed, because autograd compares the versions of saved tensors
        rows = Rows(x=x, weight=weight, bias=bias, dtype=dtype, after=after)
        of_weight, of_bias = _computed_in(rows)
        if torch.is_grad_enabled():
            # gradients that are differentiated again require a graph, so all logits are computed at once
            with autocast_again(ctx.autocast):
                losses = ctx.loss(_outputs(rows, x.reshape(-1, x.shape[-1]), of_weight, of_bias), target)
            needed = [t for t, need in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if need]
            found = iter(torch.autograd.grad(losses, needed, grad, create_graph=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None, None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        for_x = torch.empty(rows.n_rows, x.shape[-1], dtype=x.dtype, device=x.device) if wants_x else None
        # 16-bit sums over many chunks would lose small contributions
        wide = torch.promote_types(weight.dtype, torch.float32)
        for_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        at = 0
        for part, t, of_rows in rows.chunks(target, grad):
            # a leaf: autograd differentiates only the loss and `after`; the products of the module docstring follow
            # explicitly
            product = linear(part.to(dtype), of_weight, of_bias).requires_grad_()
            with torch.enable_grad(), autocast_again(ctx.autocast):
                outputs = product
                for call in after:
                    outputs = call(outputs)
                losses = ctx.loss(outputs, t)
            (of_product,) = torch.autograd.grad(losses, product, of_rows)
            # freed before the products below, so that only one chunk of logits is alive
            del outputs, losses, product
            if for_x is not None:
                for_x[at : at + len(part)] = of_product @ of_weight
            if for_weight is not None:
                if for_weight.dtype == dtype:
                    # in place, because a separate product for each chunk would be as large as the weight
                    for_weight.addmm_(of_product.T, part)
                else:
                    for_weight += of_product.T @ part.to(dtype)
            if for_bias is not None:
                for_bias += of_product.sum(0)
            at += len(part)
        for_weight = None if for_weight is None else for_weight.to(weight.dtype)
        for_bias = None if for_bias is None or bias is None else for_bias.to(bias.dtype)
        return None if for_x is None else for_x.view(x.shape), for_weight, for_bias, None, None, None


def _autocast_to(kind: str, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Set autocast to a dtype; None disables it."""
    return autocast_again(tuple((kind, dtype is not None, dtype or of_now) for _, _, of_now in autocast_now((kind,))))


def _computed_in(rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in the dtype of the product, cast once for all chunks."""
    return rows.weight.to(rows.dtype), None if rows.bias is None else rows.bias.to(rows.dtype)


def _outputs(rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with _autocast_to(x.device.type, None):
        found: Tensor = linear(x.to(rows.dtype), weight, bias)
    for call in rows.after:
        found = call(found)
    return found
