"""Compute cross-entropy of a linear layer's outputs, and its gradients, in chunks of rows.

With x [n, d], weight [v, d] and targets [n], a chunk has about n d / v rows, so that its logits have as many entries
as x, and at least 32 (or d, if that is less), for products of few rows are slow; they have no more entries than the
weight. Rows whose target is `ignore_index` are in no chunk; how many are left is read from the device once for a loss.

    grad x_i       = grad logits_i @ weight
    grad weight    = sum over chunks of grad logits_i^T @ x_i

A sum or mean is a scalar, whose gradient is known but for a factor: the forward pass computes its gradients beside each
chunk's logits, and the backward pass multiplies them by the factor. For the losses of rows, for float16,
whose small gradients need the factor first, and for a second backward pass or derivative, logits are computed again.

Results differ from those with full logits only by the order of summation over chunks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_amp._torch import FakeTensor
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

    def chunks(self) -> tuple[Tensor, ...]:
        """Return rows of x, chunk by chunk."""
        return torch.split(self.x.detach().reshape(-1, self.x.shape[-1]), self.chunk_rows)


def largest(rows: Rows) -> Tensor:
    """Return the index of the largest output of every row."""
    rows.check()
    with torch.no_grad():
        weight, bias = _computed_in(rows)
        found = [_outputs(rows, x, weight, bias).argmax(-1) for x in rows.chunks()]
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
    ignored = ignore_index if classes else None
    given = (rows.x, rows.weight, rows.bias, of_rows, rows, loss, ignored)
    if reduction == "none":
        return cast(Tensor, _RowLosses.apply(*given)).view(shape)  # type: ignore[no-untyped-call]
    divisor: Any = 1
    if reduction == "mean" and classes:
        counts = of_rows != ignore_index
        if weight is not None:
            # `ignore_index` is not an index of the weights, so it is replaced for the lookup
            counts = torch.where(counts, weight[of_rows.masked_fill(~counts, 0).long()], 0)
        divisor = counts.sum()
    elif reduction == "mean":
        divisor = rows.n_rows
    return cast(Tensor, _SumOfLosses.apply(*given, divisor))  # type: ignore[no-untyped-call]


class _RowLosses(torch.autograd.Function):
    """Loss of every row: x, weight, bias and targets -> [n]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: Rows, loss: Any, ignored: Any
    ) -> Tensor:
        _save(ctx, x, weight, bias, target, rows, loss, ignored)
        return _losses(rows, target, loss, ignored)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients_again(ctx, grad), None, None, None, None


class _SumOfLosses(torch.autograd.Function):
    """Sum of the losses of all rows by a number: x, weight, bias, targets and the number -> []."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        rows: Rows,
        loss: Any,
        ignored: Any,
        divisor: Any,
    ) -> Tensor:
        _save(ctx, x, weight, bias, target, rows, loss, ignored)
        ctx.divisor, ctx.gradients, wanted = divisor, None, ctx.needs_input_grad[:3]
        gradients = _Gradients(rows, wanted) if any(wanted) and rows.dtype != torch.float16 else None
        losses = _losses(rows, target, loss, ignored, gradients, divisor)
        ctx.gradients = None if gradients is None else gradients.found()
        ctx.dtype = losses.dtype
        # 16-bit types would lose the contributions of small losses
        total: Tensor = losses.to(_wide(losses.dtype)).sum() / divisor
        return total.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # autograd compares versions when it gives the tensors
        target = ctx.saved_tensors[3]
        # taken, not copied: they are scaled in place, and a second pass would scale them again
        ready, ctx.gradients = ctx.gradients, None
        if ready is None or torch.is_grad_enabled():
            of_rows = (grad.to(_wide(ctx.dtype)) / ctx.divisor).to(ctx.dtype).expand(len(target))
            return *_gradients_again(ctx, of_rows), None, None, None, None, None
        return *(None if own is None else own.mul_(grad) for own in ready), None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _save(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: Rows, loss: Any, ignored: Any
) -> None:
    ctx.save_for_backward(x, weight, bias, target)
    # not `rows` itself, because its tensors are saved already
    ctx.loss, ctx.given = loss, (rows.dtype, rows.after, ignored)
    ctx.autocast = autocast_now((x.device.type,))


def _losses(
    rows: Rows, target: Tensor, loss: Any, ignored: Any, gradients: "_Gradients | None" = None, divisor: Any = 1
) -> Tensor:
    """Return the loss of every row; 0 where it is ignored. `gradients` get those of the sum by the divisor."""
    weight, bias = _computed_in(rows)
    found: Tensor | None = None
    for at, part, t in _chunks(rows, ignored, target):
        if gradients is None:
            losses = loss(_outputs(rows, part, weight, bias), t)
        else:
            losses = gradients.add(part, t, at, loss, weight, bias, divisor=divisor)
        found = losses.new_zeros(len(target)) if found is None else found
        found[at] = losses
    if found is None:
        # no row counts: the dtype is that of the losses of no rows
        flat = rows.x.detach().reshape(-1, rows.x.shape[-1])
        found = loss(_outputs(rows, flat[:0], weight, bias), target[:0]).new_zeros(len(target))
    return found


def _chunks(rows: Rows, ignored: Any, target: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the places of rows that are not ignored, with these rows of x and of the target, chunk by chunk."""
    flat = rows.x.detach().reshape(-1, rows.x.shape[-1])
    if ignored is None:
        places = torch.arange(len(flat), device=flat.device)
    else:
        # those that count first, in their order: as many bytes for all targets
        out = target == ignored
        places = out.to(torch.uint8).argsort(stable=True)
        if not isinstance(out, FakeTensor) and not out.is_meta:
            places = places[: len(out) - int(out.sum())]
    for at in torch.split(places, rows.chunk_rows):
        yield at, flat[at], target[at]


class _Gradients:
    """Gradients of x, weight and bias, to which those of chunks are added.

    Args:
        wanted: Whether each of the three is needed.
        autocast: The state of autocast in which the loss is computed; None for the current one.
    """

    def __init__(self, rows: Rows, wanted: Sequence[bool], autocast: Any = None) -> None:
        self._rows, self._autocast = rows, autocast
        x, weight, bias = rows.x, rows.weight, rows.bias
        # rows that are ignored have no gradient
        self._of_x = torch.zeros(rows.n_rows, x.shape[-1], dtype=x.dtype, device=x.device) if wanted[0] else None
        # 16-bit sums over many chunks would lose small contributions
        wide = _wide(weight.dtype)
        self._of_weight = torch.zeros_like(weight, dtype=wide, requires_grad=False) if wanted[1] else None
        use_bias = wanted[2] and bias is not None
        self._of_bias = torch.zeros_like(bias, dtype=wide, requires_grad=False) if use_bias else None  # type: ignore[arg-type]

    def add(
        self,
        part: Tensor,
        target: Tensor,
        at: Tensor,
        loss: Any,
        weight: Tensor,
        bias: Tensor | None,
        *,
        grad: Tensor | None = None,
        divisor: Any = 1,
    ) -> Tensor:
        """Add those of the rows `at`, and return their losses, whose gradients are `grad`, or each 1 / divisor."""
        # a leaf: autograd differentiates only the loss and `after`; the products of the module docstring follow
        # explicitly
        dtype = self._rows.dtype
        with _autocast_to(part.device.type, None):
            product = linear(part.to(dtype), weight, bias).detach().requires_grad_()
        with torch.enable_grad(), nullcontext() if self._autocast is None else autocast_again(self._autocast):
            outputs = product
            for call in self._rows.after:
                outputs = call(outputs)
            losses = loss(outputs, target)
        if grad is None:
            one = torch.ones((), dtype=_wide(losses.dtype), device=losses.device)
            grad = (one / divisor).to(losses.dtype).expand_as(losses)
        (of_product,) = torch.autograd.grad(losses, product, grad)
        found: Tensor = losses.detach()
        # freed before the products below, so that only one chunk of logits is alive
        del outputs, losses, product
        with _autocast_to(part.device.type, None):
            if self._of_x is not None:
                self._of_x[at] = (of_product @ weight).to(self._of_x.dtype)
            if self._of_weight is not None:
                if self._of_weight.dtype == dtype:
                    # in place, because a separate product for each chunk would be as large as the weight
                    self._of_weight.addmm_(of_product.T, part)
                else:
                    self._of_weight += of_product.T @ part.to(dtype)
            if self._of_bias is not None:
                self._of_bias += of_product.sum(0)
        return found

    def found(self) -> list[Tensor | None]:
        """Return the gradients, in the shapes and types of the three."""
        x, weight, bias = self._rows.x, self._rows.weight, self._rows.bias
        of_x = None if self._of_x is None else self._of_x.view(x.shape)
        of_weight = None if self._of_weight is None else self._of_weight.to(weight.dtype)
        of_bias = None if self._of_bias is None or bias is None else self._of_bias.to(bias.dtype)
        return [of_x, of_weight, of_bias]


def _gradients_again(ctx: Any, grad: Tensor) -> Iterable[Tensor | None]:
    """Return the gradients of x, weight and bias for those of the losses of rows; logits are computed again."""
    x, weight, bias, target = ctx.saved_tensors
    dtype, after, ignored = ctx.given
    # `Rows.given` is not needed, because autograd compares the versions of saved tensors
    rows = Rows(x=x, weight=weight, bias=bias, dtype=dtype, after=after)
    of_weight, of_bias = _computed_in(rows)
    if torch.is_grad_enabled():
        # gradients that are differentiated again require a graph, so all logits are computed at once
        with autocast_again(ctx.autocast):
            losses = ctx.loss(_outputs(rows, x.reshape(-1, x.shape[-1]), of_weight, of_bias), target)
        needed = [t for t, need in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if need]
        found = iter(torch.autograd.grad(losses, needed, grad, create_graph=True))
        return [next(found) if need else None for need in ctx.needs_input_grad[:3]]
    gradients = _Gradients(rows, ctx.needs_input_grad[:3], ctx.autocast)
    for at, part, t in _chunks(rows, ignored, target):
        gradients.add(part, t, at, ctx.loss, of_weight, of_bias, grad=grad[at])
    return gradients.found()


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
