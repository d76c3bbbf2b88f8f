"""The rules of further operators: by value, along some dims, and by places that are looked up.

`embedding_bag` has none: which rows are in one bag is told by values.
"""

from lightning_amp.graph.flow import Call, Follows, nothing, register_flow, same_but
from lightning_amp.graph.flow_rules import pointwise, reduction

register_flow(
    *(
        "square",
        "reciprocal",
        "sign",
        "floor",
        "ceil",
        "round",
        "expm1",
        "log1p",
        "log2",
        "logaddexp",
        "atan2",
    ),
    *("log_sigmoid", "hardtanh", "hardswish", "hardsigmoid", "relu6", "mish", "celu", "selu", "threshold"),
    *("nan_to_num", "isnan", "isfinite", "remainder", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_and", "bitwise_or", "addcmul", "addcdiv", "lerp", "clamp_min", "clamp_max", "broadcast_to"),
)(pointwise)


@register_flow("glu", "topk", "sort", "argsort", "cumprod", "logcumsumexp", "cummax", "cummin")
def _along_one(call: Call) -> Follows:
    """All dims but the one that they go along, the last if none is named; the results of several are alike."""
    return same_but(call, [call.arguments.get("dim", -1)])


@register_flow("roll")
def _roll(call: Call) -> Follows:
    """All dims but those that are turned; without any the values are turned as one row."""
    return same_but(call, call.arguments["dims"]) if call.arguments["dims"] else nothing(call)


@register_flow("tril", "triu")
def _triangle(call: Call) -> Follows:
    """Rows and columns are told by their numbers."""
    return same_but(call, [-2, -1])


@register_flow("pad", "constant_pad_nd")
def _pad(call: Call) -> Follows:
    """All dims but those that are padded, which are named from the last one backwards."""
    widths = call.arguments["pad"]
    return same_but(call, [-1 - i // 2 for i, n in enumerate(widths) if n])


@register_flow(
    *("max", "min", "argmax", "argmin", "median", "prod", "all", "any", "std", "count_nonzero"),
    *("linalg_vector_norm", "norm"),
)
def _reduction(call: Call) -> Follows:
    """All dims but those that are reduced; of two tensors value by value."""
    return pointwise(call) if len(call.shapes) > 1 else reduction(call)


@register_flow("gather")
def _gather(call: Call) -> Follows:
    """All dims but the one that is looked up along, where the index has as many there as the tensor."""
    dim = call.arguments["dim"] % max(len(call.result), 1)
    same = [a == b for a, b in zip(*call.shapes, strict=True)]
    return [[(0, d), (1, d)] if same[d] and d != dim else [] for d in range(len(call.result))]


@register_flow("index_select")
def _index_select(call: Call) -> Follows:
    """The dim that is looked up along follows the index."""
    dim = call.arguments["dim"] % max(len(call.result), 1)
    return [[(1, 0)] if d == dim and call.shapes[1] else [(0, d)] for d in range(len(call.result))]
