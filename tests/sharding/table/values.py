"""Operators value by value, reductions, scans, what sorts, and what moves values: views, slices, lookups, writes."""

import torch
import torch.nn.functional as F

from tests.sharding.table.case import bools, case, ints

X = (2, 9, 6)

VALUES = [
    case("add with alpha by name", lambda x, y: torch.add(x, y, alpha=2), X, X),
    case("in-place with a split row", lambda x, y: (x * 1).mul_(y), X, (9, 1), at={0: 1, 1: 0}),
    case("in-place of a whole tensor", lambda x, y: (y * 1).add_(x), X, X, refused="every rank has whole"),
    case("+= ", lambda x, y: _plus_equal(x * 1, y), X, X),
    case("out=", lambda x, y: torch.add(x.detach(), y.detach(), out=torch.empty(X)), X, X, refused="out"),
    case("functions", lambda x: x.sin() + x.cos().exp() + x.abs().sqrt() + x.tanh() + x.erf(), X),
    case("more functions", lambda x: x.sigmoid().log() + x.square().log1p() + x.expm1() + x.atan(), X),
    case("rare functions", lambda x: x.sinh() + x.asinh() + torch.special.erfcx(x) + x.frac() + x.trunc(), X),
    case("activations", lambda x: F.gelu(x) + F.silu(x) + F.elu(x) + F.leaky_relu(x) + F.softplus(x), X),
    case("more activations", lambda x: F.mish(x) + F.hardswish(x) + F.relu6(x) + F.selu(x) + F.celu(x), X),
    case("gelu by tanh", lambda x: F.gelu(x, approximate="tanh") + F.logsigmoid(x), X),
    case("rrelu in evaluation", lambda x: F.rrelu(x, training=False), X),
    case("clamp by names", lambda x: x.clamp(min=-0.5, max=0.7), X),
    case("clamp by tensors", lambda x, y: torch.clamp(x, min=y), X, (6,)),
    case("where of a condition", lambda x: torch.where(x > 0), X, refused="where"),
    case("masked_fill_ ", lambda x, m: (x * 1).masked_fill_(m, 3.0), X, bools(*X), at={0: 1, 1: 1}),
    case("masked_select", lambda x: x.masked_select(x > 0), X, refused="masked_select"),
    case("mask as an index", lambda x: x[x > 0], X, refused="mask"),
    case("nonzero", lambda x: (x > 0).nonzero(), X, refused="nonzero"),
    case("unique", lambda x: torch.unique(x.detach()), X, refused="unique"),
    case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), X, X, (6,)),
    case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1, value=0.5), X, X, (9, 1)),
    case("isnan", lambda x: (x / 0).isnan() | x.isfinite() | torch.isinf(x), X),
    case("isclose", lambda x, y: torch.isclose(x, y), X, X),
    case("type", lambda x: x.type(torch.float32).type_as(x) + x.float().half().double(), X, tolerance=0.001),
    case("bfloat16", lambda x: (x.bfloat16() * 2).double(), X, tolerance=0.01),
    case("complex from parts", lambda x, y: torch.complex(x, y).conj() * torch.polar(x.abs(), y), X, X),
    case("conjugate parts", lambda x, y: torch.complex(x, y).conj().imag + torch.complex(x, y).conj().real, X, X),
    case("conjugate products", lambda x, y: _adjoint_products(torch.complex(x, y), torch.complex(y, x)), X, X),
    case("view_as_complex", lambda x: torch.view_as_real(torch.view_as_complex(x) ** 2), (9, 4, 2), at=0),
    case("angle", lambda x: torch.complex(x, x + 1).angle(), X),
    case("nan_to_num", lambda x: (x.log()).nan_to_num(0.0), X),
    case("like", lambda x: torch.zeros_like(x) + torch.ones_like(x) * 2 + torch.full_like(x, 3) + x, X),
    case("new", lambda x: x.new_zeros(6) + x.new_ones((9, 6)) + x.new_tensor([1.0]) + x, X),
    case("bucketize", lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5).double()), X),
    case("searchsorted", lambda x, b: torch.searchsorted(b.sort()[0], x), X, (7,)),
    case("detach", lambda x: x.detach() * x, X),
    case("clone", lambda x: x.clone() + x.contiguous() + torch.clone(x), X),
    # --- reductions ---
    case("nansum", lambda x: torch.where(x > 1, float("nan"), x).nansum(1), X),
    case("nanmean", lambda x: torch.where(x > 1, float("nan"), x).nanmean(1), X),
    case("var with correction", lambda x: x.var(1, correction=0) + torch.var(x, dim=1, unbiased=False), X),
    case("var_mean", lambda x: torch.var_mean(x, 1) + torch.std_mean(x, dim=1, keepdim=True), X),
    case("mean in 16 bits", lambda x: (x.half().abs() * 3000 + 3000).mean((1, 2)).detach().double(), X, tolerance=2e-3),
    case("variance in 16 bits", lambda x: (x.half() * 100).var(1).detach().double(), X, tolerance=2e-2),
    case("deviation of equal values", lambda x: (x * 0).std(1) + torch.std_mean(x * 0, 1)[0] + x.sum(1), X),
    case("largest of equal values", lambda x: [(x * 0 + v / 7).float().max() == torch.tensor(v / 7) for v in range(1, 50)], X),
    case("amax", lambda x: x.amax(1) + x.amin((1, 2))[:, None], X),
    case("max by name", lambda x: x.max(dim=-2, keepdim=True).values, X),
    case("argmin of what is not a number", lambda x: torch.where(x > 0.5, torch.nan, x).argmin(1), X),
    case("max of two", lambda x, y: torch.max(x, y) + torch.min(x, y), X, X),
    case("aminmax", lambda x: torch.aminmax(x, dim=1), X),
    case("any and all", lambda x: (x > 1).any(1) | (x > -1).all(1), X),
    case("any and all of bytes", lambda x: [~(x > 0).to(torch.uint8).any(1), ~(x > -2).to(torch.uint8).all((0, 1))], X),
    case("count_nonzero", lambda x: torch.count_nonzero(x > 0, 1), X),
    case("prod", lambda x: x.prod(1), X),
    case("median of all", lambda x: x.median(), X, refused="median"),
    case("quantile", lambda x: x.quantile(0.3, dim=1), X),
    case("mode", lambda x: x.round().mode(1).values, X),
    case("kthvalue", lambda x: x.kthvalue(3, 1).values, X),
    case("norm over it", lambda x: x.norm(dim=1) + x.norm(p=1, dim=1) + x.norm(p=3, dim=1), X),
    case("norm by largest", lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), X),
    case("logsumexp", lambda x: x.logsumexp(1), X),
    case("dist", lambda x, y: torch.dist(x, y), X, X),
    case("histc", lambda x: torch.histc(x, 5, -2, 2), X),
    case("bincount", lambda i: torch.bincount(i, minlength=7), ints(7, 20), at=0),
    case("log_softmax over it", lambda x: F.log_softmax(x, 1) + F.softmin(x, 1), X),
    case("gumbel_softmax", lambda x: F.gumbel_softmax(x * 0, dim=-1).sum(-1), X),
    case("glu over it", lambda x: F.glu(x, 1), (2, 8, 6)),
    # --- scans and order ---
    case("cumsum along all", lambda x: x.cumsum(0), (9,), at=0, refused="cumsum"),
    case("cumprod", lambda x: x.cumprod(1), X),
    case("cummax", lambda x: x.cummax(1), X),
    case("logcumsumexp", lambda x: x.logcumsumexp(1), X),
    case("diff", lambda x: x.diff(dim=1), X),
    case("sort downwards", lambda x: x.sort(dim=1, descending=True).values, X),
    case("triu", lambda x: x.triu(1) + x.tril(-1), (2, 9, 9)),
    case("triu of columns", lambda x: x.triu() + torch.tril(x, 2), (2, 9, 9), at=2),
    case("diagonal", lambda x: torch.diagonal(x, 0, 0, 2), (6, 9, 6)),
    case("trace", torch.trace, (9, 9), at=0),
]  # fmt: skip


def _plus_equal(x, y):
    x += y
    x *= 2
    return x


def _adjoint_products(a, b):
    a, b = a.movedim(0, -1), b.movedim(0, -1)
    return [torch.view_as_real(x) for x in (a.mH @ b, a @ b.mH, a.conj().mT @ b)]


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
    case("booleans by index", lambda x: ~(x > 0)[:, torch.tensor([1, 3, 1])], X),
    case("booleans by gather", lambda x: ~(x > 0).gather(1, torch.arange(36).view(2, 3, 6) % 9), X),
    case("narrow from a tensor", lambda x: x.narrow(1, torch.tensor(2), 5), X),
    case("split at places in a tensor", lambda x: x.tensor_split(torch.tensor([2, 5]), dim=1), X),
    case("flip of no dim", lambda x: x.flip([]), X),
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
