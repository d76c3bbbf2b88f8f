"""Register the dim rules of losses: by value or by row without reduction, sums of pieces with reduction="sum".

A mean is none of these: a capture writes it down as a sum that is divided once (`rewrites.py`).
"""

from lightning_amp.graph.flow import Follows, OperatorCall, broadcast, collect, nothing, register_flow, sums_over

BY_VALUE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    *("hinge_embedding_loss", "margin_ranking_loss"),
)
"""Losses that compare value with value; arguments are broadcast."""
BY_CLASS = ("cross_entropy_loss", "nll_loss_nd")
"""Losses of [row, class, ...] with classes [row, ...] or probabilities of the same shape; a weight is per class."""
BY_ROW = ("multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "triplet_margin_loss")
"""Losses of [row, ...] with anything of as many rows; a weight is per class."""
NONE, SUM = 0, 2


@register_flow(*BY_VALUE, *BY_CLASS, *BY_ROW)
def _loss(call: OperatorCall) -> Follows:
    """Without reduction every dim of the result is one that would be summed over."""
    if call.arguments["reduction"] != NONE:
        return nothing(call)
    groups = _groups(call)
    return groups if len(groups) == len(call.result) else nothing(call)


@sums_over(*BY_VALUE, *BY_CLASS, *BY_ROW)
def _sum_of_losses(call: OperatorCall) -> Follows:
    """With reduction="sum"."""
    return _groups(call) if call.arguments["reduction"] == SUM else []


def _groups(call: OperatorCall) -> Follows:
    """By dim of the losses without reduction: where they lie in the arguments."""
    if call.op in BY_VALUE:
        rank = max(map(len, call.shapes))
        sizes = [max(s[d - rank] for s in call.shapes if rank - d <= len(s)) for d in range(rank)]
        pairs = [p for k, shape in enumerate(call.shapes) for p in broadcast(shape, k, tuple(sizes))]
        return collect(tuple(sizes), pairs)
    a, b = call.shapes[:2]
    if len(a) < 2:
        return []
    if call.op in BY_CLASS:
        # probabilities have the dim of classes too
        return [[(0, d), (1, d - (d > 0 and len(a) > len(b)))] for d in range(len(a)) if d != 1]
    compared = [k for k in range(len(call.shapes)) if k != call.ref("weight")]
    return [[(k, 0) for k in compared]] if all(call.shapes[k][:1] == a[:1] for k in compared) else []
