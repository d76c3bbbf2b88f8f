"""Operators that move values: views, slices, concatenations, lookups, writes."""

import torch
import torch.nn.functional as F

from tests.dist.table.case import bools, case, ints

X = (2, 9, 6)
E8 = (2, 8, 6)
IMAGE = (2, 4, 8, 6)

PLACES = [
    # --- views ---
    case("flatten", lambda x: x.flatten() * 2, X),
    case("flatten with the batch", lambda x: x.flatten(0, 1), X),
    case("flatten with features", lambda x: x.flatten(1), X),
    case("view and back", lambda x: x.view(18, 6).exp().view(2, 9, 6), X),
    case("view with -1", lambda x: x.view(2, -1, 3, 2).sum(-1), X),
    case("reshape of heads", lambda x: x.reshape(2, 9, 3, 2).permute(0, 2, 1, 3).reshape(6, 9, 2), X),
    case("reshape inside parts", lambda x: x.reshape(2, 4, 2, 6), E8),
    case("reshape across parts", lambda x: x.reshape(2, 3, 3, 6), X),
    case("reshape to other factors", lambda x: x.reshape(-1).reshape(9, 12), X),
    case("view of flattened", lambda x: x.flatten().view(12, 9), X),
    case("unflatten", lambda x: x.unflatten(1, (4, 2)) + x.unflatten(-2, (4, -1)), E8),
    case("unflatten features", lambda x: torch.unflatten(x, 2, (3, 2)), X),
    case("view_as", lambda x: x.view_as(torch.empty(18, 6)) + x.reshape_as(torch.empty(18, 6)), X),
    case("squeeze", lambda x: x.unsqueeze(1).squeeze() + x[None].squeeze(0) + x[..., None].squeeze(-1), X),
    case("squeeze of a number of dims", lambda x: x[:, None, :, None].squeeze((1, 3)), X),
    case("unsqueeze", lambda x: x.unsqueeze(-2) + x[:, :, None], X),
    case("expand", lambda x: x[:, None].expand(2, 3, -1, -1) * 2, X),
    case("expand_as", lambda x, y: x.expand_as(y) * y, (9, 6), X, at={0: 0}),
    case("broadcast_to", lambda x: torch.broadcast_to(x, (3, 2, 9, 6)), X),
    case("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), X, (9, 1)),
    case("atleast_3d", lambda x: torch.atleast_2d(x) + torch.atleast_3d(x)[..., 0], (9, 6), at=0),
    case("permute", lambda x: x.permute(2, 0, 1), X),
    case("permute by name", lambda x: torch.permute(x, dims=(1, -1, 0)), X),
    case("transpose", lambda x: x.transpose(1, 2) + x.mT + x.swapaxes(-1, 1) + x.swapdims(1, 2), X),
    case("T", lambda x: x.T + x.t() + x.mH, (9, 6), at=0),
    case("movedim", lambda x: x.movedim(1, 0) + torch.moveaxis(x, 0, 1), X),
    case("movedim of several", lambda x: torch.movedim(x, (0, 1), (-1, 0)), X),
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (1, 4, 8, 6), at=2),
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), IMAGE, at=2),
    case("pixel_unshuffle across parts", lambda x: F.pixel_unshuffle(x, 2), (2, 4, 10, 6), at=2),
    case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), IMAGE, at=2),
    case(
        "patches by views",
        lambda x: x.view(2, 4, 4, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 12, -1),
        IMAGE,
        at=2,
    ),
    case("window partition", lambda x: _windows(x, 2) * 2, (2, 8, 6, 4)),
    case("shifted windows", lambda x: _windows(torch.roll(x, (-1, -1), (1, 2)), 2), (2, 8, 6, 4)),
    case("windows and back", lambda x: _from_windows(_windows(x, 2).softmax(1), 2, 8, 6), (2, 8, 6, 4)),
    case("view_as_real", lambda x: torch.view_as_real(x + 1j), X),
    case("view in another type", lambda x: x.view(torch.int64), X),
    # --- slices ---
    case("slice", lambda x: x[:, 1:-1], X),
    case("slice with a step", lambda x: x[:, 1:-1:2], X),
    case("slice with a large step", lambda x: x[:, ::4], X),
    case("short slice", lambda x: x[:, :2] * 2, X),
    case("slice of one", lambda x: x[:, 4:5] + x, X),
    case("empty slice", lambda x: x[:, 3:3], X),
    case("slice of features", lambda x: x[..., 2:4], X),
    case("differences of slices", lambda x: x[:, 1:] - x[:, :-1], X),
    case("second differences", lambda x: x[:, 2:] - 2 * x[:, 1:-1] + x[:, :-2], X),
    case("select", lambda x: x[:, 3] + x[:, -1] + x.select(1, 0), X),
    case("select of a feature", lambda x: x[..., 3], X),
    case("select of a sample", lambda x: x[1], X),
    case("narrow", lambda x: x.narrow(1, 2, 5) + torch.narrow(x, 1, -5, 5), X),
    case("narrow by a tensor", lambda x: x.narrow(-1, 2, 3), X),
    case("split", lambda x: x.split(4, 1), X),
    case("split in sizes", lambda x: torch.split(x, [2, 3, 4], dim=1), X),
    case("split of features", lambda x: [t * i for i, t in enumerate(x.split(2, -1))], X),
    case("chunk", lambda x: x.chunk(3, 1), X),
    case("chunk of features", lambda x: x.chunk(3, dim=-1), X),
    case("tensor_split", lambda x: torch.tensor_split(x, 4, 1), X),
    case("tensor_split at places", lambda x: torch.tensor_split(x, (2, 5), dim=1), X),
    case("hsplit", lambda x: torch.hsplit(x, 3), X),
    case("unbind", lambda x: x.unbind(1)[3] + x.unbind(-2)[0], X),
    case("unbind of features", lambda x: x.unbind(-1), X),
    case("unbind of the batch", lambda x: x.unbind(), X),
    case("iteration over samples", lambda x: [t * 2 for t in x], X),
    case("iteration over it", lambda x: [t * 2 for t in x], (5, 2), at=0),
    case("take a row and look back", lambda x: x - x[:, :1], X),
    case("flip", lambda x: x.flip(1) * x, X),
    case("flip both", lambda x: torch.flip(x, (0, 1)) + x.fliplr(), X),
    case("rot90", lambda x: x.rot90(1, (1, 2)), X),
    case("roll", lambda x: x.roll(3, 1) - torch.roll(x, -2, dims=1), X),
    case("roll of both", lambda x: torch.roll(x, (3, 1), (1, 2)), X),
    case("roll of all", lambda x: torch.roll(x, 5), X),
    case("roll by more than n", lambda x: torch.roll(x, 20, 1), X),
    case("repeat", lambda x: x.repeat(1, 3, 1), X),
    case("repeat to more dims", lambda x: x.repeat(2, 1, 1, 2), X),
    case("tile", lambda x: torch.tile(x, (2, 1)), X),
    case("repeat_interleave", lambda x: x.repeat_interleave(3, 1) + torch.repeat_interleave(x, 3, dim=1), X),
    case("repeat_interleave flat", lambda x: torch.repeat_interleave(x, 2), X),
    case(
        "repeat_interleave by values",
        lambda x: x.repeat_interleave(torch.arange(9), 1),
        X,
        refused="depends on values",
    ),
    # --- put together ---
    case("cat", lambda x, y: torch.cat([x, y], 1), X, X, at={0: 1, 1: 1}),
    case("cat with a class token", lambda x, c: torch.cat([c.expand(2, 1, 6), x], 1), X, (1, 1, 6)),
    case("cat of tokens at the end", lambda x, c: torch.cat([x, c.expand(2, 3, 6)], dim=1), X, (1, 1, 6)),
    case("cat of features", lambda x, y: torch.cat([x, y, x], -1), X, X),
    case("cat with an empty side", lambda x, e: torch.cat([x, e, x[:, :0]], 1), X, (2, 0, 6)),
    case("cat with itself", lambda x: torch.cat([x, x * 2], 1).softmax(1), X),
    case("cat of a whole with split features", lambda x, y: torch.cat([x, y], 1), X, X, at={0: 1, 1: 2}),
    case("cat of different types", lambda x: torch.cat([x.float(), x], 1), X, tolerance=1e-06),
    case("stack", lambda x, y: torch.stack([x, y], 1), X, X),
    case("stack at the end", lambda x: torch.stack((x, x * 2), dim=-1), X),
    case("hstack", lambda x, y: torch.hstack([x, y]) + torch.column_stack([x, y]), X, X),
    case("vstack", lambda x, y: torch.vstack([x, y]) + torch.concat([x, y]), X, X),
    case("block of chunks", lambda x: torch.cat([t * i for i, t in enumerate(x.chunk(3, 1))], 1), X),
    case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (9,), (6,), at=0),
    case("cartesian_prod", lambda x, y: torch.cartesian_prod(x, y), (9,), (6,), at=0),
    case("positions", lambda x: x + torch.arange(x.shape[1])[:, None], X),
    # --- lookups ---
    case("embedding", lambda i, w: F.embedding(i, w), ints(5, 2, 9), (5, 3)),
    case("embedding with padding", lambda i, w: F.embedding(i, w, padding_idx=2), ints(5, 2, 9), (5, 3)),
    case("embedding with split rows", lambda i, w: F.embedding(i, w), ints(9, 2, 7), (9, 3), at={1: 0}),
    case("embedding with split columns", lambda i, w: F.embedding(i, w), ints(9, 2, 7), (9, 6), at={1: 1}),
    case("embedding_bag", lambda i, w: F.embedding_bag(i, w), ints(5, 4, 9), (5, 3), refused="embedding_bag"),
    case("one_hot", lambda i: F.one_hot(i, 5), ints(5, 2, 9)),
    case("one_hot by values", lambda i: F.one_hot(i), ints(5, 2, 9)),
    case("index", lambda x: x[:, torch.tensor([0, 3, -1])], X),
    case("index with a list", lambda x: x[:, [0, 3, 5, 5]], X),
    case("index of two dims", lambda x: x[:, [0, 3, 5], [1, 2, 3]], X),
    case("index of dims apart", lambda x: x[[0, 1], :, [2, 3]], X),
    case("index by a number", lambda x: x[torch.tensor(1)][:2] + x[:, torch.tensor(3)], X),
    case("index of it and another apart", lambda x: x[[0, 1], :, [2, 3], :], (2, 6, 9, 4), at=2),
    case("index and slice", lambda x: x[1, 2:8, [2, 3]], X),
    case("index of a permutation", lambda x: x[:, torch.arange(8, -1, -1)], X),
    case("index by split positions", lambda x, i: x[i], (6, 4), ints(6, 9), at={1: 0}),
    case("index by split positions of a table", lambda x, i: x[:, i], (2, 7, 4), ints(7, 3, 9), at={1: 1}),
    case("index of split by split", lambda x, i: x[:, i], X, ints(9, 8), at={0: 1, 1: 0}),
    case("neighbours by index", lambda x, i: x[:, i].mean(2) - x, X, ints(9, 9, 3), at={0: 1, 1: 0}),
    case("neighbours of a whole index", lambda x, i: x[:, i].mean(2) - x, X, ints(9, 9, 3)),
    case(
        "neighbours by batch",
        lambda x, i: x[torch.arange(2)[:, None, None], i],
        X,
        ints(9, 2, 9, 3),
        at={0: 1, 1: 1},
    ),
    case("index_select", lambda x: x.index_select(1, torch.tensor([8, 0, 0])), X),
    case("index_select of features", lambda x: torch.index_select(x, -1, torch.tensor([5, 0])), X),
    case("take", lambda x: torch.take(x, torch.tensor([0, 50, 7])), X),
    case("take_along_dim", lambda x: torch.take_along_dim(x, x.argsort(1), 1), X),
    case("gather", lambda x, i: x.gather(1, i), X, ints(9, 2, 4, 6)),
    case(
        "gather of split by split", lambda x, i: torch.gather(x, 1, i), X, ints(9, 2, 9, 6), at={0: 1, 1: 1}
    ),
    case("gather of whole by split", lambda x, i: x.gather(1, i), X, ints(9, 2, 7, 6), at={1: 1}),
    case("gather along another", lambda x, i: x.gather(2, i), X, ints(6, 2, 9, 3), at={0: 1, 1: 1}),
    case("gather along another by whole", lambda x, i: x.gather(-1, i), X, ints(6, 2, 9, 3)),
    case("gather of fewer rows", lambda x, i: x.gather(2, i), X, ints(6, 2, 5, 3)),
    case(
        "log-probabilities of tokens",
        lambda x, i: x.log_softmax(-1).gather(-1, i[..., None])[..., 0],
        X,
        ints(6, 2, 9),
        at={0: 1, 1: 1},
    ),
    # --- writes ---
    case(
        "scatter", lambda x, i, s: x.scatter(2, i, s), X, ints(6, 2, 9, 1), (2, 9, 1), at={0: 1, 1: 1, 2: 1}
    ),
    case(
        "scatter along it",
        lambda x, s: x.scatter(1, torch.tensor([[[0], [8]]]).expand(2, 2, 6), s),
        X,
        (2, 2, 6),
    ),
    case(
        "scatter of a number",
        lambda x, i: torch.zeros_like(x).scatter_(-1, i, 1.0) * x,
        X,
        ints(6, 2, 9, 1),
        at={0: 1, 1: 1},
    ),
    case("scatter_add along it", lambda x, i, s: x.scatter_add(1, i, s), X, ints(9, 2, 4, 6), (2, 4, 6)),
    case(
        "scatter_add of split",
        lambda x, i, s: x.scatter_add(1, i, s),
        X,
        ints(9, 2, 8, 6),
        (2, 8, 6),
        at={0: 1, 1: 1, 2: 1},
    ),
    case(
        "scatter_add to cells",
        lambda s, i: torch.zeros(4, 6).double().scatter_add(0, i[:, None].expand(9, 6), s),
        (9, 6),
        ints(4, 9),
        at={0: 0, 1: 0},
    ),
    case(
        "scatter_add_ to cells",
        lambda s, i: torch.zeros(4, 6).double().scatter_add_(0, i[:, None].expand(9, 6), s),
        (9, 6),
        ints(4, 9),
        at={0: 0, 1: 0},
        refused="scatter_add_",
    ),
    case(
        "scatter_reduce",
        lambda x, i, s: x.scatter_reduce(2, i, s, "amax"),
        X,
        ints(6, 2, 9, 3),
        (2, 9, 3),
        at={0: 1, 1: 1, 2: 1},
    ),
    case("index_add", lambda x, s: x.index_add(1, torch.tensor([0, 5, 0]), s), X, (2, 3, 6)),
    case(
        "index_add of split",
        lambda x, i, s: x.index_add(1, i, s),
        X,
        ints(9, 8),
        (2, 8, 6),
        at={0: 1, 1: 0, 2: 1},
    ),
    case(
        "index_add to cells",
        lambda c, i, s: c.index_add(0, i, s, alpha=2),
        (4, 6),
        ints(4, 9),
        (9, 6),
        at={1: 0, 2: 0},
    ),
    case("index_add along another", lambda x, s: x.index_add(2, torch.tensor([0, 5]), s), X, (2, 9, 2)),
    case("index_copy", lambda x, s: x.index_copy(1, torch.tensor([0, 5]), s), X, (2, 2, 6)),
    case(
        "index_fill",
        lambda x: x.index_fill(1, torch.tensor([0, 5]), 2.0) + x.index_fill(2, torch.tensor([1]), 3.0),
        X,
    ),
    case("index_put", lambda x, s: x.index_put((torch.tensor([0, 1]), torch.tensor([3, 8])), s), X, (2, 6)),
    case(
        "index_put of split",
        lambda c, i, s: c.index_put((i,), s, accumulate=True),
        (4, 6),
        ints(4, 9),
        (9, 6),
        at={1: 0, 2: 0},
    ),
    case(
        "masked_scatter",
        lambda x, m, s: x.masked_scatter(m, s),
        X,
        bools(*X),
        (108,),
        refused="masked_scatter",
    ),
    case("put a slice", lambda x, y: _put(x, (slice(None), slice(2, 7)), y), X, (2, 5, 6)),
    case("put a number", lambda x: _put(x, (slice(None), 0), 0.5), X),
    case("put a row", lambda x, y: _put(x, (slice(None), 4), y), X, (2, 6)),
    case("put features", lambda x, y: _put(x, (Ellipsis, slice(1, 3)), y), X, (2, 9, 2), at={0: 1, 1: 1}),
    case("put with a step", lambda x: _put(x, (slice(None), slice(0, None, 2)), 0.0), X),
    case("put by a mask", lambda x: _put(x, x.detach() > 0, 0.0), X),
    case("put by places", lambda x, s: _put(x, (slice(None), torch.tensor([0, 5])), s), X, (2, 2, 6)),
    case("put into a view", lambda x: _put_into_view(x), X),
    case("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 2, 7), X, (2, 5, 6)),
    case("select_scatter", lambda x, y: x.select_scatter(y, 1, 3), X, (2, 6)),
    # --- windows of positions ---
    case("unfold", lambda x: x.unfold(1, 3, 1), X),
    case("unfold with a step", lambda x: x.unfold(1, 4, 2).mean(-1), (2, 12, 3)),
    case("unfold of features", lambda x: x.unfold(-1, 2, 2), X),
    case("F.unfold", lambda x: F.unfold(x, 3, padding=1), IMAGE, at=2),
    case("F.unfold with strides", lambda x: F.unfold(x, (2, 3), dilation=2, stride=2), (2, 3, 12, 9), at=2),
    case(
        "searchsorted in an order",
        lambda x, y: torch.searchsorted(x.detach(), y.detach(), sorter=x.argsort(-1)),
        (9, 4),
        (9, 5),
        at=0,
    ),
    case("F.unfold of one sample", lambda x: F.unfold(x, 2), (4, 8, 6), at=0),
    case("F.fold", lambda x: F.fold(x, (4, 4), 2), (1, 8, 9), at=2, refused="col2im"),
    case("neighbourhood by unfold", lambda x: _neighbourhood(x), X),
    case(
        "neighbourhood by pad and stack",
        lambda x: torch.stack([F.pad(x, (0, 0, 1, 1))[:, i : i + 9] for i in range(3)], 2),
        X,
    ),
    case("moving average", lambda x: F.pad(x, (0, 0, 3, 0)).cumsum(2)[:, 3:], X),
]


def _windows(x, w):
    b, h, n, c = x.shape
    return x.view(b, h // w, w, n // w, w, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, c)


def _from_windows(x, w, h, n):
    b = x.shape[0] // (h // w * (n // w))
    return x.view(b, h // w, n // w, w, w, -1).permute(0, 1, 3, 2, 4, 5).reshape(b, h, n, -1)


def _put(x, index, value):
    x = x * 1
    x[index] = value
    return x * 2


def _put_into_view(x):
    x = x * 1
    x.transpose(1, 2)[:, 2] = 1.0
    x[..., :2].mul_(3)
    return x


def _neighbourhood(x):
    """Each row attends to itself and its two neighbours."""
    around = F.pad(x, (0, 0, 1, 1), value=0.0).unfold(1, 3, 1)
    weights = (x[..., None] * around).sum(2, keepdim=True).softmax(-1)
    return (weights * around).sum(-1)
