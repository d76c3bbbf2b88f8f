"""Compute matrix products, recurrent layers, small linear algebra and Fourier transforms of sharded tensors.

A contraction of a sharded dim is all-reduced; for a product of sharded rows and sharded columns, the right operand is
gathered. Fourier transforms are computed dim by dim, so that one of two transformed dims may be sharded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.derivatives import refuse_second
from lightning_amp.sharding._torch import is_reached
from lightning_amp.sharding.collectives import gather, reduce_scatter
from lightning_amp.sharding.dispatch.by_rule import by_rule, rule_plan
from lightning_amp.sharding.dispatch.plans import TENSOR
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.registry import BY_RULE, composed, name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import (
    ShardedTensor,
    computed_in,
    dim_of,
    local_of,
    part_in,
    shape_of,
    splits_of,
    wrap,
)
from lightning_amp.sharding.splits import WHOLE, MeshAxis


@operator("linear")
def _linear(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Leave the bias out of a product that is all-reduced: otherwise every rank would add it."""
    if bias is not None and any(splits_of(t).at(len(shape_of(t)) - 1) for t in (x, weight)):
        found = F.linear(x, weight)
        return found + bias.to(found.dtype)
    tensors = [x, weight, *([] if bias is None else [bias])]
    plan = rule_plan(func, tuple(tensors), {}, tensors)
    assert plan is not None, "it has a rule"
    return replace(plan, call=_linear_of_parts, args=(TENSOR,) * len(tensors))


def _linear_of_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    later = getattr(weight, "add_up_later", None)
    if later is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    x, bias = computed_in(x), None if bias is None else computed_in(bias)
    return cast(Tensor, _LaterWeight.apply(x, weight, bias, later))


class _LaterWeight(torch.autograd.Function):
    """A linear layer whose backward pass defers the gradient of its weight.

    The gradient of its input is needed first: the layer before all-reduces it if features are contracted. The gradient
    of the weight is computed during that all-reduce.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Any) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.later, ctx.kind = later, weight.dtype
        return F.linear(x, computed_in(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), kind = ctx.saved_tensors, ctx.kind
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ weight.to(grad.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        if is_reached(ctx.next_functions[1][0]):

            def compute() -> Tensor:
                return (rows.T @ x.reshape(-1, x.shape[-1])).to(kind)

            # with create_graph, the gradient must be in the graph now
            if torch.is_grad_enabled() or not ctx.later(compute):
                of_weight = compute()
        return of_x, of_weight, of_bias, None


@operator("addmm", "baddbmm", "addbmm", "addmv", "addr")
def _added(func: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    name = name_of(func)
    product = torch.outer(a, b) if name == "addr" else torch.matmul(a, b)
    product = product.sum(0) if name == "addbmm" else product
    if not beta:
        # c may contain NaN, such as uninitialised memory
        return product * alpha
    c = c.to(product.dtype)
    return product * alpha + c * beta if (alpha, beta) != (1, 1) else product + c


@operator("matmul", "mm", "bmm")
def _matmul(func: Any, a: Tensor, b: Tensor) -> Any:
    """Compute by rule, except `[.., row, k] @ [.., k, column]` with rows of a and rows or columns of b sharded."""
    row, k = len(shape_of(a)) - 2, len(shape_of(b)) - 2
    if min(row, k) < 0 or shape_of(a)[:-2] != shape_of(b)[:-2]:
        return BY_RULE
    left, rest = splits_of(a).at(row), splits_of(a).without(row)
    right = splits_of(b).on(left.axis) if left else None
    if left is None or right is None or right.dim < k or splits_of(b).replaced(left.axis, None) is not rest:
        return BY_RULE
    parts = (computed_in(local_of(t)) for t in (a, b))
    return wrap(_GatheredProduct.apply(*parts, left.axis, right.dim, right.owners), splits_of(a))


class _GatheredProduct(torch.autograd.Function):
    """Compute left @ right with right gathered for the product, released, and gathered again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
        # a view would keep a larger tensor alive, such as queries, keys and values in one
        ctx.part = right.untyped_storage().nbytes() != right.nbytes
        ctx.save_for_backward(left, right.contiguous().clone() if ctx.part else right)
        ctx.to = axis, dim, owners
        return left @ gather(right, axis, dim, owners)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.part:
            # the copy is not in the autograd graph
            refuse_second("a product with a view of a larger tensor, split over ranks; copy the view before (.clone())")
        left, right = ctx.saved_tensors
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            of_left = grad @ gather(right, *ctx.to).mH
        if ctx.needs_input_grad[1]:
            of_right = reduce_scatter(left.mH @ grad, *ctx.to)
        return of_left, of_right, None, None, None


@operator("einsum")
def _einsum(func: Any, equation: str, operands: Any, *, path: Any) -> Any:
    """Compute by rule, after the ellipsis is replaced by letters."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if arrow and "." not in left:
        return BY_RULE
    parts = left.split(",")
    free = [chr(n) for n in range(ord("A"), ord("Z") + 1) if chr(n) not in equation]
    dots = [
        "".join(free[: len(shape_of(t)) - len(part) + 3][::-1]) if "..." in part else ""
        for t, part in zip(operands, parts, strict=True)
    ]
    most = max(dots, key=len)
    left = ",".join(part.replace("...", own) for part, own in zip(parts, dots, strict=True))
    once = "".join(sorted(x for x in set(left) - {*most, ","} if left.count(x) == 1))
    right = right.replace("...", most) if arrow else most + once
    return by_rule(func, f"{left}->{right}", list(operands))


@operator("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(func: Any, x: Tensor, *args: Any) -> Any:
    """Compute by rule; sharded steps and packed sequences raise a ShardError."""
    # the last argument is batch_first, which as a number is the dim of steps; packed sequences have the overload "data"
    if splits_of(x).at(int(args[-1])) or func._overloadname == "data":
        raise shard_error(func, [x], f"step after step depends on the one before, along dim {int(args[-1])}")
    return BY_RULE


@operator("_linalg_check_errors")
def _check_errors(func: Any, info: Tensor, *args: Any, **kwargs: Any) -> None:
    func(part_in(info, WHOLE), *args, **kwargs)


composed(
    _nested_tensor_from_mask_left_aligned=lambda x, mask: False,
    allclose=lambda x, y, *args, **kwargs: bool(torch.isclose(x, y, *args, **kwargs).all()),
    bilinear=lambda x, y, w, b=None: torch.einsum("...i,oij,...j->...o", x, w, y) + (0 if b is None else b),
    dist=lambda x, y, p=2: torch.linalg.vector_norm(x - y, p),
    dot=lambda a, b: (a * b).sum(),
    equal=lambda x, y: shape_of(x) == shape_of(y) and bool((x == y).all()),
    mv=torch.matmul,
    rot90=lambda x, k=1, dims=(0, 1): _turned(x.clone(), k % 4, dims),
    tril=lambda x, k=0: x.masked_fill(~_triangle(x).tril(k), 0),
    triu=lambda x, k=0: x.masked_fill(~_triangle(x).triu(k), 0),
    trace=lambda x: x.diagonal().sum(),
    vdot=lambda a, b: (a.conj() * b).sum(),
)


@operator("isin")
def _is_in(func: Any, x: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    among = part_in(among, WHOLE) if isinstance(among, Tensor) else among
    return wrap(torch.isin(local_of(x), among, invert=invert), splits_of(x))


def _turned(x: Tensor, quarters: int, dims: Any) -> Tensor:
    return _turned(x.flip(dims[1]).transpose(*dims), quarters - 1, dims) if quarters else x


def _triangle(x: Tensor) -> Tensor:
    return torch.ones(shape_of(x)[-2:], dtype=torch.bool, device=x.device)


aten = torch.ops.aten


@operator("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fourier(func: Any, x: Tensor, dim: Sequence[int], norm: int, last: Any) -> Any:
    """Compute by rule, which reshards by all-to-all; or dim by dim, if one of several transformed dims is sharded."""
    dims, name = [dim_of(x, d) for d in dim], name_of(func)
    if len(dims) == 1 or not any(d in dims for d in splits_of(x).dims):
        return BY_RULE
    if name == "_fft_c2c":
        *rest, one = sorted(dims, key=lambda d: splits_of(x).at(d) is not None)
        return func(func(x, rest, norm, last), [one], norm, last)
    # the last dim is the real one: it is transformed first by r2c and last by c2r
    *rest, one = dims
    if name == "_fft_r2c":
        return aten._fft_c2c.default(func(x, [one], norm, last), rest, norm, True)
    return func(aten._fft_c2c.default(x, rest, norm, False), [one], norm, last)


@operator("view_as_real")
def _as_real(func: Any, x: Tensor) -> Any:
    """Resolve a lazy conjugate of the local shard, which the wrapper does not record."""
    if not (isinstance(x, ShardedTensor) and x.held.is_conj()):
        return BY_RULE
    return by_rule(func, wrap(x.held.resolve_conj(), x.splits, True, x.strides))
