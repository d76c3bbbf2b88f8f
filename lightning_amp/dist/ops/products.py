"""Matrix products: contractions of a split dim are added up; for rows by columns the right operand is gathered."""

from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.by_rule import NO_RULE, by_rule
from lightning_amp.dist.collectives import gather, reduce_scatter
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.registry import operator
from lightning_amp.dist.sharded_tensor import local_of, shape_of, splits_of, wrap
from lightning_amp.dist.splits import MeshAxis, Splits

aten = torch.ops.aten


@operator("linear")
def _linear(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Without the bias where sums are added up: it would be added by every rank."""
    found = by_rule(func, "linear", (x, weight), {})
    return found if bias is None else found + bias


@operator("addmm", "baddbmm", "addbmm")
def _addmm(func: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.matmul(a, b)
    if func._schema.name == "aten::addbmm":
        product = product.sum(0)
    return product * alpha + c * beta if (alpha, beta) != (1, 1) else product + c


@operator("matmul", "mm", "bmm")
def _matmul(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """By rule, but for `[.., row, k] @ [.., k, column]` with rows of a and rows or columns of b on all ranks."""
    rank = len(shape_of(a)), len(shape_of(b))
    if min(rank) >= 2:
        for split in splits_of(a):
            right = splits_of(b).on(split.axis)
            row, k = split.dim == rank[0] - 2, rank[1] - 2
            if row and right and right.dim >= k and shape_of(a)[:-2] == shape_of(b)[:-2]:
                rest = splits_of(b).replaced(split.axis, None)
                if Splits.of([s for s in splits_of(a) if s.axis is not split.axis]) is not rest:
                    break
                found = _GatheredProduct.apply(local_of(a), local_of(b), split.axis, right.dim, right.owners)
                return wrap(found, splits_of(a))
    return by_rule(func, "matmul" if min(rank) < 2 else func._schema.name[6:], (a, b), {})


class _GatheredProduct(torch.autograd.Function):
    """left @ right with right gathered for the product, not kept, and gathered again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
        # a view would keep the memory of a larger tensor, such as queries, keys and values in one
        part = right.untyped_storage().nbytes() != right.nbytes
        ctx.save_for_backward(left, right.contiguous().clone() if part else right)
        ctx.to = axis, dim, owners
        return left @ gather(right, axis, dim, owners)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            of_left = grad @ gather(right, *ctx.to).transpose(-1, -2)
        if ctx.needs_input_grad[1]:
            of_right = reduce_scatter(left.transpose(-1, -2) @ grad, *ctx.to)
        return of_left, of_right, None, None, None


@operator("einsum")
def _einsum(func: Any, equation: str, operands: Any, *, path: Any = None) -> Tensor:
    """By rule, with every letter named."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if "." in left:
        names = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        free = [
            next(n for n in names if n not in equation)
            for _ in range(max(len(shape_of(t)) for t in operands))
        ]
        dots = [len(shape_of(t)) - len(p.replace("...", "")) for t, p in zip(operands, parts, strict=True)]
        most = max(d if "..." in p else 0 for d, p in zip(dots, parts, strict=True))
        letters = free[:most]
        parts = [
            p.replace("...", "".join(letters[most - d :]) if "..." in p else "")
            for d, p in zip(dots, parts, strict=True)
        ]
        right = right.replace("...", "".join(letters))
        right = right if arrow else "".join(letters)
    if not arrow:
        once = [x for x in sorted(set("".join(parts))) if "".join(parts).count(x) == 1 and x not in right]
        right += "".join(once)
    found = by_rule(func, "einsum", (f"{','.join(parts)}->{right}", list(operands)), {})
    assert found is not NO_RULE, "einsum has a rule"
    return found


@operator("dot", "vdot", "inner")
def _dot(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


@operator("outer", "ger")
def _outer(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return a[:, None] * b[None]


@operator("mv")
def _mv(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)
