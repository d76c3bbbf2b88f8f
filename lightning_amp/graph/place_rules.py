"""Register the dim rules of further operators: elementwise, of matrices, and by index.

`embedding_bag` has none: which rows are in one bag depends on values.
"""

from lightning_amp.graph.flow import Follows, OperatorCall, broadcast, collect, nothing, register_flow, same_but
from lightning_amp.graph.flow_rules import pointwise

register_flow(
    *("square", "reciprocal", "sign", "floor", "ceil", "round", "expm1", "log1p", "log2", "logaddexp", "atan2"),
    *("log_sigmoid", "hardtanh", "hardswish", "hardsigmoid", "relu6", "mish", "celu", "selu", "threshold"),
    *("nan_to_num", "isnan", "isfinite", "remainder", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_and", "bitwise_or", "floor_divide", "complex", "polar", "_conj", "resolve_conj", "addcmul", "addcdiv"),
    *("lerp", "clamp_min", "clamp_max", "broadcast_to"),
)(pointwise)


@register_flow("renorm")
def _renorm(call: OperatorCall) -> Follows:
    """The dim whose indices are normalised, each over all other dims."""
    dim = call.arguments["dim"] % len(call.result)
    return [[(0, d)] if d == dim else [] for d in range(len(call.result))]


@register_flow("cross", "linalg_cross")
def _cross(call: OperatorCall) -> Follows:
    """All dims of both but that of the three components: the first of size 3 if none is named."""
    dim = call.arguments["dim"]
    dim = call.result.index(3) if dim is None else dim % len(call.result)
    return [[] if d == dim else follows for d, follows in enumerate(pointwise(call))]


@register_flow("roll")
def _roll(call: OperatorCall) -> Follows:
    """All dims but those that are turned; without any the values are turned as one row."""
    return same_but(call, call.arguments["dims"]) if call.arguments["dims"] else nothing(call)


@register_flow("tril", "triu")
def _triangle(call: OperatorCall) -> Follows:
    """Rows and columns are determined by their numbers."""
    return same_but(call, [-2, -1])


@register_flow("pad", "constant_pad_nd")
def _pad(call: OperatorCall) -> Follows:
    """All dims but those that are padded, which are named from the last one backwards."""
    widths = call.arguments["pad"]
    return same_but(call, [-1 - i // 2 for i, n in enumerate(widths) if n])


@register_flow("gather")
def _gather(call: OperatorCall) -> Follows:
    """All dims but the one that is looked up along, where the index has as many there as the tensor."""
    dim = call.arguments["dim"] % max(len(call.result), 1)
    # an index that is shorter in a dim reads only the begin of the tensor: pieces of the two would not meet
    same = [a == b for a, b in zip(*call.shapes, strict=True)]
    return [[(0, d), (1, d)] if same[d] and d != dim else [] for d in range(len(call.result))]


@register_flow("index_select")
def _index_select(call: OperatorCall) -> Follows:
    """The dim that is looked up along follows the index."""
    dim = call.arguments["dim"] % max(len(call.result), 1)
    return [[(1, 0)] if d == dim and call.shapes[1] else [(0, d)] for d in range(len(call.result))]


@register_flow("cdist")
def _distances(call: OperatorCall) -> Follows:
    """[..., row, e] against [..., column, e]."""
    last = len(call.result) - 1
    pairs = [pair for k in (0, 1) for pair in broadcast(call.shapes[k][:-2], k, call.result[:-2])]
    return collect(
        call.result, [*pairs, (last - 1, (0, len(call.shapes[0]) - 2)), (last, (1, len(call.shapes[1]) - 2))]
    )


@register_flow("grid_sampler")
def _sampled(call: OperatorCall) -> Follows:
    """Samples and channels of the image; positions follow the grid."""
    return [[(0, 0), (1, 0)], [(0, 1)], *([(1, d)] for d in range(1, len(call.result) - 1))]


@register_flow("bucketize", "searchsorted")
def _looked_up(call: OperatorCall) -> Follows:
    """Values follow the tensor that is compared with the borders, rows of borders and of their order too."""
    k = call.ref("self")
    found = [[(k, d)] for d in range(len(call.result))] if k is not None else nothing(call)
    rows = len(call.shapes[0]) - 1 if call.op == "searchsorted" else 0
    borders = [other for other in range(len(call.shapes)) if other != k]
    return [follows + [(j, d) for j in borders if d < rows] for d, follows in enumerate(found)]


@register_flow("prelu")
def _channels(call: OperatorCall) -> Follows:
    """The weight is that of channels, or one for all."""
    channels = [(1, 0)] if call.shapes[1:] and call.shapes[1] not in ((), (1,)) else []
    return [[(0, d), *(channels if d == 1 else [])] for d in range(len(call.result))]


@register_flow("diagonal", "diagonal_copy", "diag_embed", "view_as_real", "view_as_complex")
def _of_last(call: OperatorCall) -> Follows:
    """All dims but two that become one, or the last, which becomes two."""
    rank = len(call.shapes[0])
    gone = [range(rank)[call.arguments[name]] for name in ("dim1", "dim2")] if "diagonal" in call.op else [rank - 1]
    if call.op == "view_as_real":
        gone = []
    if call.op == "diag_embed" and (call.arguments["dim1"], call.arguments["dim2"]) != (-2, -1):
        return nothing(call)
    left = [d for d in range(rank) if d not in gone]
    return [[(0, left[j])] if j < len(left) else [] for j in range(len(call.result))]


@register_flow(
    *("linalg_inv_ex", "linalg_det", "_linalg_det", "_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_matrix_exp"),
    *("linalg_cholesky_ex", "_linalg_solve_ex", "linalg_solve_triangular", "_linalg_slogdet", "linalg_pinv"),
)
def _matrices(call: OperatorCall) -> Follows:
    """Each matrix by itself, where all arguments have the same dims before: some results are those of one argument."""
    batches = {shape[:-2] for shape in call.shapes}
    batch = len(batches.pop()) if len(batches) == 1 else 0
    return [[(k, d) for k in range(len(call.shapes))] if d < batch else [] for d in range(len(call.result))]


@register_flow(*(f"max_{kind}{n}d{more}" for kind, more in (("pool", "_with_indices"), ("unpool", "")) for n in (2, 3)))
def _of_places(call: OperatorCall) -> Follows:
    """Samples and channels; places of largest values are numbers in the whole of their channel."""
    n = int(call.op.removesuffix("_with_indices")[-2])
    return [
        [(k, d) for k in range(len(call.shapes))] if d < len(call.result) - n else [] for d in range(len(call.result))
    ]


@register_flow("im2col", "col2im")
def _of_samples(call: OperatorCall) -> Follows:
    """Samples stay apart, where there is a dim of samples."""
    samples = len(call.result) == (3 if call.op == "im2col" else 4)
    return [[(0, 0)] if samples and d == 0 else [] for d in range(len(call.result))]
