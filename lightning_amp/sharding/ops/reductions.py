"""Compute reductions and losses over sharded dims: reduce the shards, then the results over the ranks.

Sums need no handler, because a rule declares that they are all-reduced. All others are compositions of sums, or are
reduced twice: each rank reduces its shard, and all ranks reduce the gathered results, one index per rank.
"""

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from lightning_amp.footprint.live_bytes import named_arguments
from lightning_amp.graph.rewrites import BY_CLASS, BY_ROW, BY_VALUE
from lightning_amp.sharding.collectives import reduce_now, stacked
from lightning_amp.sharding.dispatch.by_rule import by_rule, with_whole
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.registry import BY_RULE, composed, mapped, name_of, operator
from lightning_amp.sharding.sharded_tensor import dim_of, local_of, redistribute, shape_of, splits_of, wrap
from lightning_amp.sharding.splits import Splits

Dims = int | Sequence[int] | None


def dims_of(dim: Dims, n: int) -> list[int]:
    """Return the reduced dims in ascending order; all dims if `dim` is None or empty."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(n))
    return sorted({range(n)[d] for d in ([dim] if isinstance(dim, int) else dim)}) if n else []


def after(splits: Splits, gone: Sequence[int], keep: bool) -> Splits:
    """Return the splits of a result, in which reduced dims are removed or have size 1."""
    rest = splits.without(*gone)
    return rest if keep else rest.mapped(lambda d: d - sum(other < d for other in gone))


def _crosses(x: Tensor, gone: Sequence[int]) -> bool:
    return any(split.dim in gone for split in splits_of(x))


@operator("mean")
def _mean(func: Any, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    gone, kind = dims_of(dim, len(shape_of(x))), dtype or x.dtype
    if not _crosses(x, gone) or not (kind.is_floating_point or kind.is_complex):
        return BY_RULE
    # a sum may overflow in 16 bits although the mean does not
    total = torch.sum(x, gone, keepdim, dtype=torch.promote_types(kind, torch.float32))
    return (total / prod(shape_of(x)[d] for d in gone)).to(kind)


@operator("var", "std", "var_mean", "std_mean")
def _variance(
    func: Any, x: Any, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None
) -> Any:
    shape, name = shape_of(x), name_of(func)
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    gone = dims_of(dim, len(shape))
    if not (x.is_floating_point() or x.is_complex()) or (not _crosses(x, gone) and "mean" not in name):
        return BY_RULE
    less, kind = int(unbiased) if correction is None else correction, x.dtype
    # squares may overflow in 16 bits
    x = x.to(torch.promote_types(kind, torch.float32))
    mean = torch.mean(x, gone, True)
    # real-valued for complex values too
    deviation = (x - mean).abs() if x.is_complex() else x - mean
    found = torch.sum(deviation.square(), gone, keepdim) / max(prod(shape[d] for d in gone) - less, 0)
    if name.startswith("std"):
        # sqrt has no gradient at zero; torch's gradient is zero there
        found = found.masked_fill(found == 0, 0).sqrt()
    mean, found = mean.to(kind), found.to(kind.to_real())
    return (found, mean if keepdim else mean.squeeze(gone)) if name.endswith("mean") else found


@operator("amax", "amin", "max", "min", "aminmax")
def _extreme(func: Any, x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    name = name_of(func)
    if name == "aminmax":
        dims = () if dim is None else dim
        return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)
    largest = name.endswith("max")
    if isinstance(dim, Tensor):
        return torch.maximum(x, dim) if largest else torch.minimum(x, dim)
    gone = dims_of(dim, len(shape_of(x)))
    if not _crosses(x, gone):
        return BY_RULE
    if name in ("max", "min") and dim is not None:
        place = (torch.argmax if largest else torch.argmin)(x.detach(), dim, True)
        value = torch.gather(x, dim, place)
        return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))
    reduce = torch.amax if largest else torch.amin
    best = reduce(local_of(x).detach(), gone, True)
    for split in splits_of(x):
        # gathered: an all-reduce of maxima would drop NaN
        best = reduce(stacked(best, split.axis), 0) if split.dim in gone else best
    best = wrap(best, splits_of(x).without(*gone))
    if not x.requires_grad:
        return best if keepdim else best.squeeze(gone)
    # as in torch, equal values share the gradient
    hit = (x.detach() == best) | (x.detach().isnan() & best.isnan())
    found = torch.where(hit, x / hit.sum(gone, True), 0).sum(gone, keepdim)
    # that sum has the gradient but rounds: its value may differ from all values of the tensor
    best = best if keepdim else best.squeeze(gone)
    return torch.where(best.isfinite(), best + (found - found.detach()), found)


@operator("argmax", "argmin")
def _place_of_extreme(func: Any, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the first index of the extreme value; over a sharded dim, among all ranks."""
    if dim is None:
        place = getattr(torch, name_of(func))(x.flatten(), 0)
        return place.view([1] * len(shape_of(x))) if keepdim else place
    dim = dim_of(x, dim)
    if not _crosses(x, [dim]):
        return BY_RULE
    x, n = x.detach(), shape_of(x)[dim]
    best = (torch.amax if name_of(func) == "argmax" else torch.amin)(x, dim, True)
    place = torch.arange(n, device=x.device).view([-1, *[1] * (len(shape_of(x)) - 1 - dim)])
    return torch.where((x == best) | x.isnan(), place, n).amin(dim, keepdim)


composed(_is_all_true=lambda x: x.all(), _is_any_true=lambda x: x.any())


@operator("any", "all", "count_nonzero")
def _count(func: Any, x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    gone = dims_of(dim, len(shape_of(x)))
    if not _crosses(x, gone):
        return BY_RULE
    # a dry run counts the values of its own rank only
    found = torch.sum((x == 0) if name_of(func) == "all" else (x != 0), gone, keepdim)
    if name_of(func) == "count_nonzero":
        return found
    found = found == 0 if name_of(func) == "all" else found > 0
    return found.to(x.dtype) if x.dtype == torch.uint8 else found


@operator("prod", "logsumexp", "linalg_vector_norm")
def _twice(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce the shards, and then their results, by the same reduction."""
    given = named_arguments(func, (x, *args), kwargs)
    gone, keep = dims_of(given.get("dim"), len(shape_of(x))), given.get("keepdim", False)
    if not _crosses(x, gone):
        return BY_RULE
    dtype, ord = given.get("dtype"), given.get("ord", 2)
    x = x if dtype is None else x.to(dtype)
    if ord == 0:
        return torch.sum(x != 0, gone, keep).to(x.dtype)
    if ord in (inf, -inf):
        return (torch.amax if ord > 0 else torch.amin)(x.abs(), gone, keep)
    name = name_of(func)

    def reduced(t: Tensor) -> Tensor:
        if name == "prod":
            for d in gone:
                t = t.prod(d, keepdim=True)
            return t
        return t.logsumexp(gone, True) if name == "logsumexp" else torch.linalg.vector_norm(t, ord, gone, True)

    # after the local reduction, each rank owns one index of a reduced dim
    one_each = [
        split._replace(owners=Owners.even(split.axis.size, split.axis.size)) if split.dim in gone else split
        for split in splits_of(x)
    ]
    parts = wrap(reduced(local_of(x)), Splits.of(one_each))
    found = reduced(redistribute(parts, splits_of(parts).without(*gone)))
    return found if keep else found.squeeze(gone)


@operator("norm", "frobenius_norm")
def _norm(func: Any, x: Tensor, p: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if name_of(func) == "frobenius_norm":
        p, dim, keepdim = 2, p, bool(dim)
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@operator("histc")
def _histc(func: Any, x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    if min == max:
        min, max = float(x.min()), float(x.max())
    found = func(local_of(x).detach(), bins, min, max)
    for split in splits_of(x):
        found = reduce_now(found, split.axis)
    return found


@operator("quantile", "nanquantile")
def _quantile(func: Any, x: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = dims_of(dim, len(shape_of(x)))
    x = with_whole(func, x, dims)
    found = func(local_of(x), q, dim, keepdim, **kwargs)
    # several quantiles add a first dim
    more = len(shape_of(q)) if isinstance(q, Tensor) else 0
    return wrap(found, after(splits_of(x), dims, keepdim).mapped(lambda d: d + more))


NONE, MEAN, SUM = 0, 1, 2


@operator(*BY_VALUE, *BY_CLASS, *BY_ROW)
def _loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a mean as the sum divided by its count: of values, of rows, or of weights of rows of kept classes."""
    name = name_of(func)
    given = named_arguments(func, args, kwargs)
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    x, target, weight = tensors[0], tensors[1], given.get("weight")
    n_dims = len(shape_of(x))
    if given["reduction"] == MEAN and x.dtype == torch.float16 and not torch.is_autocast_enabled(x.device.type):
        # a sum may overflow although the mean does not
        wide = mapped(given, lambda t: t.float() if t.is_floating_point() else t)
        return func(**wide).to(x.dtype)
    if name in BY_CLASS and splits_of(x).at(min(1, n_dims - 1)) and not target.is_floating_point():
        return _over_classes(given)
    if given["reduction"] != MEAN:
        return BY_RULE
    if name in BY_ROW:
        return by_rule(func, **given | {"reduction": NONE}).mean()
    total = by_rule(func, **given | {"reduction": SUM})
    if name in BY_VALUE:
        return total / prod(torch.broadcast_shapes(*map(shape_of, tensors)))
    if target.is_floating_point():
        return total / (prod(shape_of(x)) // shape_of(x)[min(1, n_dims - 1)])
    kept = target != given["ignore_index"]
    # ignore_index may be outside the classes
    count = kept if weight is None else weight[torch.where(kept, target, 0)] * kept
    return total / count.sum()


def _over_classes(given: dict[str, Any]) -> Tensor:
    """Compute the loss of logits with sharded classes: a few numbers per row are communicated, never the logits."""
    x, target, weight, ignored = given["self"], given["target"], given["weight"], given["ignore_index"]
    if torch.is_autocast_enabled(x.device.type):
        # autocast does not apply to the operators below
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    n_dims = len(shape_of(x))
    dim = min(1, n_dims - 1)
    kept, n = target != ignored, shape_of(x)[dim]
    place = torch.where(kept, target, 0)
    own = torch.gather(x, dim, place.unsqueeze(dim)).squeeze(dim)
    # only cross_entropy has label_smoothing
    total = x.logsumexp(dim) if "label_smoothing" in given else 0.0
    each = 1 if weight is None else weight[place]
    found, smooth = (total - own) * each, given.get("label_smoothing") or 0.0
    if smooth:
        weights = 1 if weight is None else weight.view([-1, *[1] * (n_dims - 1 - dim)])
        of_all = total * (n if weight is None else weight.sum()) - (x * weights).sum(dim)
        found = found * (1 - smooth) + of_all * (smooth / n)
    # as in torch, gradients of ignored rows are zero
    found = torch.where(kept, found, 0)
    if given["reduction"] == NONE:
        return found
    return found.sum() / (kept * each).sum() if given["reduction"] == MEAN else found.sum()
