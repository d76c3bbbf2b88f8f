"""Losses of sharded predictions and targets: sums of the parts by rule, added up, and divided once."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.dispatch.by_rule import by_rule
from lightning_amp.dist.registry import BY_RULE, name_of, operator
from lightning_amp.dist.sharded_tensor import shape_of, splits_of
from lightning_amp.graph.rewrites import BY_CLASS, BY_ROW, BY_VALUE

NONE, MEAN, SUM = 0, 1, 2


@operator(*BY_VALUE, *BY_CLASS, *BY_ROW)
def _loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The mean is the sum by what it counts: values, rows, or rows of kept classes by their weights."""
    name = name_of(func)
    schema = func._schema.arguments
    given = kwargs | dict(zip([a.name for a in schema], args, strict=False))
    given = {a.name: given.get(a.name, a.default_value) for a in schema}
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    x, target, weight = tensors[0], tensors[1], given.get("weight")
    n_dims = len(shape_of(x))
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
    count = kept if weight is None else weight[target.clamp(min=0)] * kept
    return total / count.sum()


def _over_classes(given: dict[str, Any]) -> Tensor:
    """The loss of logits whose classes are split: a few numbers per row are sent, never the logits."""
    x, target, weight, ignored = given["self"], given["target"], given["weight"], given["ignore_index"]
    if torch.is_autocast_enabled(x.device.type):
        # autocast does not see the parts of this
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    n_dims = len(shape_of(x))
    dim = min(1, n_dims - 1)
    kept, place, n = target != ignored, target.clamp(min=0), shape_of(x)[dim]
    own = torch.gather(x, dim, place.unsqueeze(dim)).squeeze(dim)
    # only cross-entropy has smoothing as an argument
    total = x.logsumexp(dim) if "label_smoothing" in given else 0.0
    each = 1 if weight is None else weight[place]
    found, smooth = (total - own) * each, given.get("label_smoothing") or 0.0
    if smooth:
        weights = 1 if weight is None else weight.view([-1, *[1] * (n_dims - 1 - dim)])
        of_all = total * (n if weight is None else weight.sum()) - (x * weights).sum(dim)
        found = found * (1 - smooth) + of_all * (smooth / n)
    # zero gradients where nothing is kept, as of torch
    found = torch.where(kept, found, 0)
    if given["reduction"] == NONE:
        return found
    return found.sum() / (kept * each).sum() if given["reduction"] == MEAN else found.sum()
