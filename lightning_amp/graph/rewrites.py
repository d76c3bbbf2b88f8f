"""Rewrite captured operators as others with equal values that can be cut into pieces; register flow rules of losses.

    several views of several tensors    separate views: a table has one memory for all results of an operator
    a mean of all entries               the sum, divided once by the number of entries
    a loss with reduction="mean"        the loss with reduction="sum", divided once by the number of values or rows; for
                                        classes, by the number or total weight of those that are not ignored
    a sum in the memory of all losses   the losses, then their sum, so that their memory is counted and freed

A sum over pieces equals the sum over all; a mean does not. A mean with a 16-bit result is not rewritten, because its
sum may overflow.

Rules of losses: without reduction, dims follow elementwise or by row; with reduction="sum", pieces add up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_amp.footprint.live_bytes import RESIZED, named_arguments
from lightning_amp.graph.flow import Follows, OperatorCall, broadcast, collect, nothing, register_flow, sums_over

BY_VALUE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    *("hinge_embedding_loss", "margin_ranking_loss"),
)
"""Elementwise losses; their arguments are broadcast."""
BY_CLASS = ("cross_entropy_loss", "nll_loss_nd")
"""Losses of [row, class, ...] with classes [row, ...] or probabilities of the same shape; a weight is per class."""
BY_ROW = ("multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "triplet_margin_loss")
"""Losses of [row, ...] with other arguments that have as many rows; a weight is per class."""
NONE, SUM = 0, 2


@register_flow(*BY_VALUE, *BY_CLASS, *BY_ROW)
def _loss(call: OperatorCall) -> Follows:
    """Without reduction, every dim of the result follows the dims that would be summed over."""
    if call.arguments["reduction"] != NONE:
        return nothing(call)
    groups = _groups(call)
    return groups if len(groups) == len(call.result) else nothing(call)


@sums_over(*BY_VALUE, *BY_CLASS, *BY_ROW)
def _sum_of_losses(call: OperatorCall) -> Follows:
    """With reduction="sum", each dim of the losses is summed over."""
    return _groups(call) if call.arguments["reduction"] == SUM else []


def _groups(call: OperatorCall) -> Follows:
    """Return for every dim of the unreduced losses the matching dims of the arguments."""
    if call.op in BY_VALUE:
        # shape to which the arguments are broadcast
        rank = max(map(len, call.shapes))
        sizes = [max(s[d - rank] for s in call.shapes if rank - d <= len(s)) for d in range(rank)]
        pairs = [p for k, shape in enumerate(call.shapes) for p in broadcast(shape, k, tuple(sizes))]
        return collect(tuple(sizes), pairs)
    a, b = call.shapes[:2]
    if len(a) < 2:
        return []
    if call.op in BY_CLASS:
        # probabilities have a class dim too
        return [[(0, d), (1, d - (d > 0 and len(a) > len(b)))] for d in range(len(a)) if d != 1]
    compared = [k for k in range(len(call.shapes)) if k != call.ref("weight")]
    return [[(k, 0) for k in compared]] if all(call.shapes[k][:1] == a[:1] for k in compared) else []


aten = torch.ops.aten
MEAN = 1
WIDE = (torch.float32, torch.float64)
"""Dtypes that are rewritten; for narrower ones, kernels accumulate in 32 bits and round once."""


def _common_shape(tensors: Sequence[Tensor]) -> Any:
    return torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Mean over all entries."""
    return aten.sum.default(x, dtype=dtype) / x.numel() if (dtype or x.dtype) in WIDE else NotImplemented


def _mean_loss(name: str) -> Callable[..., Any]:
    """Return the replacement of a loss that may be a mean."""
    op = getattr(aten, name).default

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        given = named_arguments(op, args, kwargs)
        # the operator's own sum would keep the memory of all losses while it lives
        again = given["reduction"] == SUM and name in RESIZED
        shapes = [value.shape for key, value in given.items() if isinstance(value, Tensor) and key != "weight"]
        # whether the number of losses is known
        if name in BY_ROW:
            known = len(shapes[0]) == 2 and len({shape[:1] for shape in shapes}) == 1
        else:
            known = name in BY_VALUE or len(shapes[0]) > 1
        if not again and (given["reduction"] != MEAN or not known):
            return NotImplemented
        # the sum over all losses, to which pieces add up; it is divided below by a common count
        total = op(**given | {"reduction": NONE if name in RESIZED else SUM})
        if total.dtype not in WIDE:
            return NotImplemented
        if name in RESIZED:
            total = aten.sum.default(total)
        return total if again else total / _count(name, given)

    return rewritten


def _count(name: str, given: dict[str, Any]) -> Any:
    """Return the number by which the sum of losses is divided."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    target = tensors[1]
    if name in BY_VALUE:
        return _common_shape(tensors).numel()
    if name in BY_ROW:
        return len(tensors[0])
    if target.is_floating_point():
        return target.numel() // target.shape[1]
    counted, weight = target != given["ignore_index"], given["weight"]
    if weight is None:
        return counted.sum()
    # ignored classes may be outside of the table: they look up row 0, with weight 0
    weights = F.embedding(target.masked_fill(~counted, 0), weight.detach().unsqueeze(1)).squeeze(-1)
    return (weights * counted).sum()


REWRITES: dict[Any, Callable[..., Any]] = {
    aten.broadcast_tensors.default: lambda tensors: [tensor.expand(_common_shape(tensors)) for tensor in tensors],
    aten.meshgrid.default: aten.meshgrid.default.decompose,
    aten.meshgrid.indexing: aten.meshgrid.indexing.decompose,
    aten.mean.default: _mean,
    **{getattr(aten, name).default: _mean_loss(name) for name in (*BY_VALUE, *BY_CLASS, *BY_ROW)},
}
"""Replacement of each operator while a forward is recorded; NotImplemented keeps the operator."""
