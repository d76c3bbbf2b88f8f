"""Operators that move values: views, slices, concatenations, lookups, writes."""

import torch
import torch.nn.functional as F

from tests.dist.table.case import bools, case, ints

X = (2, 9, 6)
IMAGE = (2, 4, 8, 6)

PLACES = [
    # --- views ---
    case("view_as", lambda x: x.view_as(torch.empty(18, 6)) + x.reshape_as(torch.empty(18, 6)), X),
    case("squeeze", lambda x: x.unsqueeze(1).squeeze() + x[None].squeeze(0) + x[..., None].squeeze(-1), X),
    case("expand_as", lambda x, y: x.expand_as(y) * y, (9, 6), X, at={0: 0}),
    case("broadcast_to", lambda x: torch.broadcast_to(x, (3, 2, 9, 6)), X),
    case("atleast_3d", lambda x: torch.atleast_2d(x) + torch.atleast_3d(x)[..., 0], (9, 6), at=0),
    case("permute by name", lambda x: torch.permute(x, dims=(1, -1, 0)), X),
    case("transpose", lambda x: x.transpose(1, 2) + x.mT + x.swapaxes(-1, 1) + x.swapdims(1, 2), X),
    case("T", lambda x: x.T + x.t() + x.mH, (9, 6), at=0),
    case("movedim", lambda x: x.movedim(1, 0) + torch.moveaxis(x, 0, 1), X),
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (1, 4, 8, 6), at=2),
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), IMAGE, at=2),
    case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), IMAGE, at=2),
    case("patches by views", lambda x: x.view(2, 4, 4, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 12, -1), IMAGE, at=2),
    case("shifted windows", lambda x: _windows(torch.roll(x, (-1, -1), (1, 2)), 2), (2, 8, 6, 4)),
    case("windows and back", lambda x: _from_windows(_windows(x, 2).softmax(1), 2, 8, 6), (2, 8, 6, 4)),
    case("view in another type", lambda x: x.view(torch.int64), X),
    # --- slices ---
    case("split", lambda x: x.split(4, 1), X),
    case("tensor_split", lambda x: torch.tensor_split(x, 4, 1), X),
    case("hsplit", lambda x: torch.hsplit(x, 3), X),
    case("flip both", lambda x: torch.flip(x, (0, 1)) + x.fliplr(), X),
    case("rot90", lambda x: x.rot90(1, (1, 2)), X),
    case("roll of all", lambda x: torch.roll(x, 5), X),
    case("repeat", lambda x: x.repeat(1, 3, 1), X),
    case("tile", lambda x: torch.tile(x, (2, 1)), X),
    case("repeat_interleave by values", lambda x: x.repeat_interleave(torch.arange(9), 1), X, refused="depends on values"),
    # --- put together ---
    case("cat", lambda x, y: torch.cat([x, y], 1), X, X, at={0: 1, 1: 1}),
    case("cat of a whole with split features", lambda x, y: torch.cat([x, y], 1), X, X, at={0: 1, 1: 2}),
    case("hstack", lambda x, y: torch.hstack([x, y]) + torch.column_stack([x, y]), X, X),
    case("vstack", lambda x, y: torch.vstack([x, y]) + torch.concat([x, y]), X, X),
    case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (9,), (6,), at=0),
    case("cartesian_prod", lambda x, y: torch.cartesian_prod(x, y), (9,), (6,), at=0),
    # --- lookups ---
    case("embedding with padding", lambda i, w: F.embedding(i, w, padding_idx=2), ints(5, 2, 9), (5, 3)),
    case("embedding with split rows", lambda i, w: F.embedding(i, w), ints(9, 2, 7), (9, 3), at={1: 0}),
    case("embedding with split columns", lambda i, w: F.embedding(i, w), ints(9, 2, 7), (9, 6), at={1: 1}),
    case("embedding_bag", lambda i, w: F.embedding_bag(i, w), ints(5, 4, 9), (5, 3), refused="embedding_bag"),
    case("neighbours by index", lambda x, i: x[:, i].mean(2) - x, X, ints(9, 9, 3), at={0: 1, 1: 0}),
    case("neighbours by batch", lambda x, i: x[torch.arange(2)[:, None, None], i], X, ints(9, 2, 9, 3), at={0: 1, 1: 1}),
    case("take", lambda x: torch.take(x, torch.tensor([0, 50, 7])), X),
    case("take_along_dim", lambda x: torch.take_along_dim(x, x.argsort(1), 1), X),
    case("gather of fewer rows", lambda x, i: x.gather(2, i), X, ints(6, 2, 5, 3)),
    # --- writes ---
    case("scatter", lambda x, i, s: x.scatter(2, i, s), X, ints(6, 2, 9, 1), (2, 9, 1), at={0: 1, 1: 1, 2: 1}),
    case("scatter along it", lambda x, s: x.scatter(1, torch.tensor([[[0], [8]]]).expand(2, 2, 6), s), X, (2, 2, 6)),
    case("scatter of a number", lambda x, i: torch.zeros_like(x).scatter_(-1, i, 1.0) * x, X, ints(6, 2, 9, 1), at={0: 1, 1: 1}),
    case("scatter_add along it", lambda x, i, s: x.scatter_add(1, i, s), X, ints(9, 2, 4, 6), (2, 4, 6)),
    case("scatter_add of split", lambda x, i, s: x.scatter_add(1, i, s), X, ints(9, 2, 8, 6), (2, 8, 6), at={0: 1, 1: 1, 2: 1}),
    case("scatter_add to cells", lambda s, i: torch.zeros(4, 6).double().scatter_add(0, i[:, None].expand(9, 6), s), (9, 6), ints(4, 9), at={0: 0, 1: 0}),
    case("scatter_add_ to cells", lambda s, i: torch.zeros(4, 6).double().scatter_add_(0, i[:, None].expand(9, 6), s), (9, 6), ints(4, 9), at={0: 0, 1: 0}, refused="scatter_add_"),
    case("scatter_reduce", lambda x, i, s: x.scatter_reduce(2, i, s, "amax"), X, ints(6, 2, 9, 3), (2, 9, 3), at={0: 1, 1: 1, 2: 1}),
    case("index_add", lambda x, s: x.index_add(1, torch.tensor([0, 5, 0]), s), X, (2, 3, 6)),
    case("index_add of split", lambda x, i, s: x.index_add(1, i, s), X, ints(9, 8), (2, 8, 6), at={0: 1, 1: 0, 2: 1}),
    case("index_add to cells", lambda c, i, s: c.index_add(0, i, s, alpha=2), (4, 6), ints(4, 9), (9, 6), at={1: 0, 2: 0}),
    case("index_copy", lambda x, s: x.index_copy(1, torch.tensor([0, 5]), s), X, (2, 2, 6)),
    case("index_fill", lambda x: x.index_fill(1, torch.tensor([0, 5]), 2.0) + x.index_fill(2, torch.tensor([1]), 3.0), X),
    case("index_put", lambda x, s: x.index_put((torch.tensor([0, 1]), torch.tensor([3, 8])), s), X, (2, 6)),
    case("index_put of split", lambda c, i, s: c.index_put((i,), s, accumulate=True), (4, 6), ints(4, 9), (9, 6), at={1: 0, 2: 0}),
    case("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), X, bools(*X), (108,), refused="masked_scatter"),
    case("put features", lambda x, y: _put(x, (Ellipsis, slice(1, 3)), y), X, (2, 9, 2), at={0: 1, 1: 1}),
    case("put with a step", lambda x: _put(x, (slice(None), slice(0, None, 2)), 0.0), X),
    case("put by places", lambda x, s: _put(x, (slice(None), torch.tensor([0, 5])), s), X, (2, 2, 6)),
    case("put into a view", lambda x: _put_into_view(x), X),
    case("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 2, 7), X, (2, 5, 6)),
    case("select_scatter", lambda x, y: x.select_scatter(y, 1, 3), X, (2, 6)),
    # --- windows of positions ---
    case("unfold", lambda x: x.unfold(1, 3, 1), X),
    case("F.unfold with strides", lambda x: F.unfold(x, (2, 3), dilation=2, stride=2), (2, 3, 12, 9), at=2),
    case("searchsorted in an order", lambda x, y: torch.searchsorted(x.detach(), y.detach(), sorter=x.argsort(-1)), (9, 4), (9, 5), at=0),
    case("F.unfold of one sample", lambda x: F.unfold(x, 2), (4, 8, 6), at=0),
    case("F.fold", lambda x: F.fold(x, (4, 4), 2), (1, 8, 9), at=2, refused="col2im"),
    case("neighbourhood by unfold", lambda x: _neighbourhood(x), X),
    case("neighbourhood by pad and stack", lambda x: torch.stack([F.pad(x, (0, 0, 1, 1))[:, i : i + 9] for i in range(3)], 2), X),
]  # fmt: skip


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
