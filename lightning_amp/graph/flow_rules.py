"""Register flow rules of aten operators: which dims of a result follow which dims of arguments, and over which it sums.

`embedding_bag` has no rule: which rows belong to a bag depends on values.
"""

from lightning_amp.graph.flow import (
    Follows,
    OperatorCall,
    broadcast,
    collect,
    groups,
    nothing,
    register_flow,
    same_but,
    sums_over,
)


@register_flow(
    *("add", "add_", "sub", "rsub", "mul", "mul_", "div", "pow", "neg", "exp", "log", "sqrt", "rsqrt", "abs", "erf"),
    *("relu", "relu_", "gelu", "silu", "sigmoid", "tanh", "leaky_relu", "elu", "softplus", "clamp", "cos", "sin"),
    *("where", "masked_fill", "maximum", "minimum", "eq", "ne", "lt", "gt", "le", "ge", "bitwise_not", "logical_not"),
    *("dropout", "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh_copy", "expand", "expand_as"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "type_as", "float"),
    *("square", "reciprocal", "sign", "floor", "ceil", "round", "expm1", "log1p", "log2", "logaddexp", "atan2"),
    *("log_sigmoid", "hardtanh", "hardswish", "hardsigmoid", "relu6", "mish", "celu", "selu", "threshold"),
    *("nan_to_num", "isnan", "isfinite", "remainder", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_and", "bitwise_or", "floor_divide", "complex", "polar", "_conj", "resolve_conj", "addcmul", "addcdiv"),
    *("lerp", "clamp_min", "clamp_max", "broadcast_to"),
)
def _pointwise(call: OperatorCall) -> Follows:
    """Every dim follows that of all arguments, except those that are broadcast along it and needed whole."""
    pairs = [pair for k, shape in enumerate(call.shapes) for pair in broadcast(shape, k, call.result)]
    return collect(call.result, pairs)


# operators without a tensor argument
register_flow("arange", "zeros", "ones", "full", "empty", "scalar_tensor")(nothing)


@register_flow("linear")
def _linear(call: OperatorCall) -> Follows:
    """Rows follow the input, columns follow the weight's rows and the bias. With a 1-dim weight there are only rows."""
    last = len(call.result) - 1
    if len(call.shapes[1]) == 1:
        return same_but(call, [])
    pairs = [(d, (0, d)) for d in range(last)] + [(last, (1, 0))]
    return collect(call.result, pairs + ([(last, (2, 0))] if len(call.shapes) > 2 else []))


@register_flow("matmul", "mm", "bmm", "addmm", "baddbmm")
def _product(call: OperatorCall) -> Follows:
    """[..., row, k] @ [..., k, column]; an added tensor is broadcast."""
    first = 1 if call.op in ("addmm", "baddbmm") else 0
    a, b = call.shapes[first], call.shapes[first + 1]
    if min(len(a), len(b)) < 2:
        # a vector has no dim in the result
        if len(b) == 1:
            return [[(0, d)] for d in range(len(a) - 1)]
        return [[(1, d)] for d in (*range(len(b) - 2), len(b) - 1)]
    last = len(call.result) - 1
    pairs = [(last - 1, (first, len(a) - 2)), (last, (first + 1, len(b) - 1))]
    for k, shape in ((first, a), (first + 1, b)):
        pairs += broadcast(shape[:-2], k, call.result[:-2])
    if first:
        pairs += broadcast(call.shapes[0], 0, call.result)
    return collect(call.result, pairs)


@register_flow("einsum")
def _einsum(call: OperatorCall) -> Follows:
    """A letter of the result follows the same letter of every argument, unless that dim has size 1 and is broadcast."""
    letters, right = _letters(call)
    return [
        [(k, d) for k, d, x in letters if x == own and call.shapes[k][d] == call.result[i]]
        for i, own in enumerate(right)
    ] or nothing(call)


def _letters(call: OperatorCall) -> tuple[list[tuple[int, int, str]], str]:
    """Return (argument, dim, letter) of an einsum and the letters of its result; empty if they are implicit."""
    left, arrow, right = str(call.arguments["equation"]).replace(" ", "").partition("->")
    # without an arrow the result's letters are implicit, and dots represent any number of dims
    if not arrow or "." in left:
        return [], ""
    return [(k, d, x) for k, part in enumerate(left.split(",")) for d, x in enumerate(part)], right


@register_flow("scaled_dot_product_attention")
def _attention(call: OperatorCall) -> Follows:
    """Queries [..., row, e], keys [..., column, e], values [..., column, result column]; a mask is broadcast."""
    last = len(call.result) - 1
    pairs = [(last - 1, (0, last - 1)), (last, (2, last))]
    for k in range(3):
        pairs += broadcast(call.shapes[k][:-2], k, call.result[:-2])
    mask = call.ref("attn_mask")
    if mask is not None:
        rows = (*call.result[:-1], call.shapes[1][-2])
        pairs += [(d, source) for d, source in broadcast(call.shapes[mask], mask, rows) if d < last]
    found = collect(call.result, pairs)
    if call.arguments.get("enable_gqa"):
        # consecutive query heads share a key head: a piece of the heads needs the matching piece of the key heads
        found[-3] += [(k, len(call.shapes[k]) - 3) for k in (1, 2) if call.shapes[k][-3] not in (1, call.result[-3])]
    if call.arguments.get("is_causal"):
        # a causal mask depends on the row index in the full tensor, which a piece does not have
        found[last - 1] = []
    return found


@register_flow(
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"),
    *("glu", "topk", "sort", "argsort", "_fft_c2c", "_fft_r2c", "_fft_c2r"),
)
def _along_some(call: OperatorCall) -> Follows:
    """All dims follow, except those of `dim` (by default the last); several results have equal dims."""
    dim = call.arguments.get("dim", -1)
    return same_but(call, dim if isinstance(dim, list) else [dim])


register_flow("layer_norm", "rms_norm")(lambda call: same_but(call, range(-len(call.arguments["normalized_shape"]), 0)))
register_flow("group_norm", "instance_norm")(lambda call: same_but(call, range(1, len(call.result))))


@register_flow("batch_norm")
def _batch_norm(call: OperatorCall) -> Follows:
    """Channels follow all arguments; in evaluation mode, the other dims follow the input."""
    found = same_but(call, [] if not call.arguments["training"] else [0, *range(2, len(call.result))])
    # all other arguments are vectors over channels
    found[1] += [(k, 0) for k in range(1, len(call.shapes))]
    return found


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", *(f"conv_transpose{n}d" for n in (1, 2, 3)))


@register_flow(*CONVOLUTIONS)
def _convolution(call: OperatorCall) -> Follows:
    """Samples follow the input; with one group, channels follow weight and bias; positions only if it is pointwise."""
    found = nothing(call)
    if len(call.shapes[0]) != len(call.shapes[1]):  # one sample, without a dim of samples
        return found
    found[0] = [(0, 0)]
    stride, padding = (call.arguments.get(name) for name in ("stride", "padding"))
    # a kernel of size 1 with stride 1 reads no neighbours
    if isinstance(stride, list) and isinstance(padding, list) and set(stride) == {1} and not any(padding):
        for d, size in enumerate(call.shapes[1][2:], start=2):
            found[d] = [(0, d)] if size == 1 and call.shapes[0][d] == call.result[d] else []
    if call.arguments.get("groups", 1) == 1:
        # in a transposed convolution the weight has the channels of the input first
        found[1] = [(1, int(is_transposed(call))), *[(k, 0) for k in range(2, len(call.shapes))]]
    return found


def is_transposed(call: OperatorCall) -> bool:
    """Return whether a convolution is transposed."""
    return "transpose" in call.op or bool(call.arguments.get("transposed", False))


@register_flow(
    *(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
def _of_positions(call: OperatorCall) -> Follows:
    """Samples and channels follow; in 2D, positions too if disjoint full windows become one, or one becomes several."""
    rank = len(call.result)
    found = same_but(call, range(rank - int(call.op.removesuffix("_aa")[-2]), rank))
    if call.op in ("avg_pool2d", "max_pool2d"):
        sizes = [list(call.arguments[name] or ()) for name in ("kernel_size", "stride", "padding")]
        kernel, stride, padding = (size * 2 if len(size) == 1 else size for size in sizes)
        tiles = stride in ([], kernel) and not any(padding) and call.arguments.get("dilation", 1) in (1, [1], [1, 1])
        whole = tiles and all(n == k * m for n, k, m in zip(call.shapes[0][-2:], kernel, call.result[-2:], strict=True))
    else:
        nearest = call.op == "upsample_nearest2d" and call.arguments.get("output_size") is None
        # a factor of 1.4 makes two positions from two, and both copy the first
        nearest = nearest and all(float(scale).is_integer() for scale in call.arguments["scale_factors"])
        whole = nearest and all(m % n == 0 for n, m in zip(call.shapes[0][2:], call.result[2:], strict=True))
    return [[(0, d)] for d in range(rank)] if whole and rank == 4 else found


@register_flow(
    *("sum", "nansum", "mean", "amax", "amin", "logsumexp", "var", "std", "prod", "all", "any", "count_nonzero"),
    *("max", "min", "argmax", "argmin", "median", "nanmedian", "mode", "kthvalue", "linalg_vector_norm", "norm"),
)
def _reduction(call: OperatorCall) -> Follows:
    """All dims follow except those that are reduced; with two tensors the operator is elementwise."""
    if len(call.shapes) > 1:
        return _pointwise(call)
    gone = reduced_dims(call)
    if call.arguments.get("keepdim"):
        return same_but(call, gone)
    return [[(0, d)] for d in range(len(call.shapes[0])) if d not in gone]


def reduced_dims(call: OperatorCall) -> list[int]:
    """Return the dims of the argument that are reduced."""
    dim, rank = call.arguments.get("dim"), len(call.shapes[0])
    if dim == [] and call.op in ("all", "any"):  # for these, an empty list means no dims; for others, all dims
        return []
    return [d % rank for d in ([dim] if isinstance(dim, int) else dim or range(rank))]


@register_flow("transpose", "t", "permute")
def _reorder(call: OperatorCall) -> Follows:
    """Dims are permuted."""
    rank = len(call.result)
    order = list(range(rank))
    if call.op == "permute":
        order = [d % rank for d in call.arguments["dims"]]
    elif rank > 1:
        a, b = (call.arguments.get(f"dim{i}", i) % rank for i in (0, 1))
        order[a], order[b] = order[b], order[a]
    return [[(0, d)] for d in order]


@register_flow("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as")
def _reshape(call: OperatorCall) -> Follows:
    """Merged or split dims follow by their outermost factor; dims of size 1 follow none."""
    found = nothing(call)
    for before, after in groups(call.shapes[0], call.result) if 0 not in call.result else ():
        if before and after:
            # contiguous entries share the outermost index; a piece along an inner dim would be scattered
            found[after[0]] = [(0, before[0])]
            if call.op == "view_as":  # the other one has the sizes of the result
                found[after[0]].append((1, after[0]))
    return found


@register_flow("slice", "narrow", "split", "split_with_sizes", "chunk", "cat", "unbind", "select", "stack", "getitem")
def _parts(call: OperatorCall) -> Follows:
    """All dims follow except the one that is split or concatenated; several results have equal dims."""
    if call.op == "getitem":
        return same_but(call, [])
    dim = call.arguments.get("dim") or 0
    if call.op in ("select", "unbind"):
        gone = dim % len(call.shapes[0])
        return [[(0, d)] for d in range(len(call.shapes[0])) if d != gone]
    # `cat` ignores arguments of shape (0,), whatever the shapes of the others
    whole = [k for k, shape in enumerate(call.shapes) if shape != (0,) or len(call.result) == 1]
    sources = whole if call.op in ("cat", "stack") else (0,)
    dim %= len(call.result)
    moved = 1 if call.op == "stack" else 0
    return [[] if d == dim else [(k, d - moved * (d > dim)) for k in sources] for d in range(len(call.result))]


@register_flow("embedding")
def _embedding(call: OperatorCall) -> Follows:
    """Rows follow the indices, columns follow the table's columns."""
    # with scale_grad_by_freq, a row's gradient is divided by its count among all indices
    alone = not call.arguments.get("scale_grad_by_freq")
    return [*([(1, d)] if alone else [] for d in range(len(call.result) - 1)), [(0, 1)]]


# each index of the given dim is normalized over all other dims
register_flow("renorm")(
    lambda call: same_but(call, {*range(len(call.result))} - {call.arguments["dim"] % len(call.result)})
)


@register_flow("cross", "linalg_cross")
def _cross(call: OperatorCall) -> Follows:
    """All dims follow both arguments, except that of the three components; by default the first dim of size 3."""
    dim = call.arguments["dim"]
    dim = call.result.index(3) if dim is None else dim % len(call.result)
    return [[] if d == dim else follows for d, follows in enumerate(_pointwise(call))]


# without dims, the flattened tensor is rolled
register_flow("roll")(lambda call: same_but(call, call.arguments["dims"] or range(len(call.result))))


# a triangle depends on row and column indices
register_flow("tril", "triu")(lambda call: same_but(call, [-2, -1]))
# all dims follow except those that are padded; `pad` lists these from the last dim backwards
register_flow("pad", "constant_pad_nd")(
    lambda call: same_but(call, [-1 - i // 2 for i, n in enumerate(call.arguments["pad"]) if n])
)


@register_flow("gather")
def _gather(call: OperatorCall) -> Follows:
    """All dims except `dim` follow both arguments, if index and tensor have equal sizes there."""
    dim = call.arguments["dim"] % max(len(call.result), 1)
    # a shorter index reads only the beginning of the tensor, so equal pieces of both would not correspond
    same = [a == b for a, b in zip(*call.shapes, strict=True)]
    return [[(0, d), (1, d)] if same[d] and d != dim else [] for d in range(len(call.result))]


@register_flow("index_select")
def _index_select(call: OperatorCall) -> Follows:
    """`dim` follows the index; all other dims follow the tensor."""
    dim = call.arguments["dim"] % max(len(call.result), 1)
    return [[(1, 0)] if d == dim and call.shapes[1] else [(0, d)] for d in range(len(call.result))]


@register_flow("cdist")
def _distances(call: OperatorCall) -> Follows:
    """[..., row, e] against [..., column, e]."""
    last = len(call.result) - 1
    pairs = [pair for k in (0, 1) for pair in broadcast(call.shapes[k][:-2], k, call.result[:-2])]
    pairs += [(last - 1, (0, len(call.shapes[0]) - 2)), (last, (1, len(call.shapes[1]) - 2))]
    return collect(call.result, pairs)


# samples and channels follow the image, positions follow the grid
register_flow("grid_sampler")(
    lambda call: [[(0, 0), (1, 0)], [(0, 1)], *([(1, d)] for d in range(1, len(call.result) - 1))]
)


@register_flow("bucketize", "searchsorted")
def _looked_up(call: OperatorCall) -> Follows:
    """All dims follow the values; batch dims of `searchsorted` also follow the boundaries and their sorter."""
    k = call.ref("self")
    found = [[(k, d)] for d in range(len(call.result))] if k is not None else nothing(call)
    rows = len(call.shapes[0]) - 1 if call.op == "searchsorted" else 0
    borders = [other for other in range(len(call.shapes)) if other != k]
    return [follows + [(j, d) for j in borders if d < rows] for d, follows in enumerate(found)]


@register_flow("prelu")
def _channels(call: OperatorCall) -> Follows:
    """Channels also follow the weight, unless one weight is shared by all."""
    channels = [(1, 0)] if call.shapes[1:] and call.shapes[1] not in ((), (1,)) else []
    return [[(0, d), *(channels if d == 1 else [])] for d in range(len(call.result))]


@register_flow("diagonal", "diagonal_copy", "diag_embed", "view_as_real", "view_as_complex")
def _of_last(call: OperatorCall) -> Follows:
    """All dims follow, except the diagonal dims, the last dim of `diag_embed`, and the dim of (real, imaginary)."""
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
    """Batch dims follow all arguments if these have equal batch dims: some results depend on a single argument."""
    batches = {shape[:-2] for shape in call.shapes}
    batch = len(batches.pop()) if len(batches) == 1 else 0
    return [[(k, d) for k in range(len(call.shapes))] if d < batch else [] for d in range(len(call.result))]


@register_flow(*(f"max_{kind}{n}d{more}" for kind, more in (("pool", "_with_indices"), ("unpool", "")) for n in (2, 3)))
def _of_places(call: OperatorCall) -> Follows:
    """Samples and channels follow all arguments; positions do not, because indices count in the full channel."""
    first = len(call.result) - int(call.op.removesuffix("_with_indices")[-2])
    return [[(k, d) for k in range(len(call.shapes))] if d < first else [] for d in range(len(call.result))]


@register_flow("im2col", "col2im")
def _of_samples(call: OperatorCall) -> Follows:
    """Samples follow the input, if there is a dim of samples."""
    samples = len(call.result) == (3 if call.op == "im2col" else 4)
    return [[(0, 0)] if samples and d == 0 else [] for d in range(len(call.result))]


# the dims that are reduced
sums_over("sum", "nansum")(lambda call: [[(0, d)] for d in reduced_dims(call)])


@sums_over("matmul", "mm", "bmm")
def _sum_of_products(call: OperatorCall) -> Follows:
    """Sum over columns of the first and rows of the second argument; not for addmm: each piece would add its addend."""
    a, b = call.shapes[:2]
    return [[(0, len(a) - 1), (1, max(len(b) - 2, 0))]]


@sums_over("linear")
def _sum_of_features(call: OperatorCall) -> Follows:
    """Sum over features of the input and columns of the weight, without bias: every piece would add it."""
    return [] if len(call.shapes) > 2 else [[(0, len(call.shapes[0]) - 1), (1, len(call.shapes[1]) - 1)]]


@sums_over(*CONVOLUTIONS)
def _sum_of_channels(call: OperatorCall) -> Follows:
    """Sum over channels of the input and of the weight, without a bias and with one group."""
    alone = len(call.shapes) == 2 and len(call.shapes[0]) == len(call.shapes[1])
    alone = alone and call.arguments.get("groups", 1) == 1
    return [[(0, 1), (1, 1 - int(is_transposed(call)))]] if alone else []


@sums_over("einsum")
def _sum_of_letters(call: OperatorCall) -> Follows:
    """Sum over each letter that the result lacks, in all arguments except those of size 1, which are broadcast."""
    letters, right = _letters(call)
    places: dict[str, list[tuple[int, int]]] = {}
    for k, d, letter in letters:
        if letter not in right and call.shapes[k][d] != 1:
            places.setdefault(letter, []).append((k, d))
    return list(places.values())
