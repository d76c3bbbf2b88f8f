"""Classes of operators of models on images, volumes and point clouds, each with all pairs of its sizes and options."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp.errors import ShardError
from lightning_amp.sharding.ops import ShardedTensor
from tests.each import all_pairs
from tests.sharding.table.case import Case, case, ints

SIZES = {1: (13,), 2: (13, 9), 3: (9, 8, 5)}
"""Of images by their number of dims; no number of ranks divides all of them."""
POINTS, QUERIES = (11, 3), (9, 3)


def _two(n: int) -> Any:
    return {0: (2, 3)} if n > 1 else {0: 2}


def _pairs(*choices: Any) -> list[Any]:
    """Rows with every pair of choices; of a choice with options of a case its first value counts."""
    return all_pairs(product(*choices), lambda row: tuple(one[0] if isinstance(one, tuple) else one for one in row))


def _conv(n: int, kind: str, **options: int) -> Any:
    return lambda x, w, b: getattr(F, f"{kind}{n}d")(x, w, b, **options)


CLASSES: list[Case] = [
    case(f"conv{n}d of kernel {k}, padding {p}, stride {s}", _conv(n, "conv", padding=p, stride=s),
         (2, 2, *SIZES[n]), (3, 2, *[k] * n), (3,), at=_two(n))
    for n, k, p, s in all_pairs(product((1, 2, 3), (2, 3), (0, 1), (1, 2)))
]  # fmt: skip
CLASSES += [
    case(f"conv_transpose{n}d of kernel {k}, stride {s}", _conv(n, "conv_transpose", stride=s),
         (2, 2, *SIZES[n]), (2, 3, *[k] * n), (3,), at=_two(n))
    for n, k, s in all_pairs(product((1, 2, 3), (2, 3), (1, 2)))
]  # fmt: skip
CLASSES += [
    case(f"{kind}_pool{n}d of kernel {k}, stride {s}",
         lambda x, kind=kind, n=n, k=k, s=s: getattr(F, f"{kind}_pool{n}d")(x, k, s), (2, 3, *SIZES[n]), at=_two(n))
    for kind, n, k, s in all_pairs(product(("avg", "max"), (1, 2, 3), (2, 4), (2, 4)))
]  # fmt: skip
CLASSES += [
    case(f"{mode} of {n} dims by {f}", lambda x, mode=mode, f=f: F.interpolate(x, scale_factor=f, mode=mode),
         (1, 2, *SIZES[n]), at=_two(n))
    for (n, mode), f in product(
        [(1, "nearest"), (2, "nearest"), (3, "nearest"), (1, "linear"), (2, "bilinear"), (3, "trilinear")], (2, 3))
]  # fmt: skip
CLASSES += [
    case(f"pad {n}d by {mode}, {sides}", lambda x, mode=mode, sides=sides: F.pad(x, sides, mode),
         (2, 2, *SIZES[n]), at=_two(n))
    for mode in ("constant", "reflect", "replicate", "circular")
    for n, sides in ((2, (2, 2, 2, 2)), (2, (1, 2, 3, 4)), (2, (0, 0, 0, 3)), (3, (1, 1, 0, 2, 2, 1)))
]  # fmt: skip
CLASSES += [
    case(f"conv padded by {mode}", lambda x, w, mode=mode: F.conv2d(F.pad(x, (1, 1, 1, 1), mode), w),
         (2, 2, *SIZES[2]), (3, 2, 3, 3), at=_two(2))
    for mode in ("reflect", "replicate", "circular")
]  # fmt: skip


def _tracked(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    running = torch.zeros(8).double(), torch.ones(8).double()
    return [F.batch_norm(x, *running, w, b, True, 0.3), *running]


# --- attention to neighbours: windows stay inside of the grid at its borders ---


def _windows(n: int, k: int) -> Tensor:
    start = (torch.arange(n) - k // 2).clamp(0, n - k)
    return start[:, None] + torch.arange(k)


def _near(q: Tensor, k: int) -> Tensor:
    """Every place of a grid `[batch, *grid, feature]` attends to a window of k places along each dim."""
    keys, n = q * 2, q.dim() - 2
    for d in range(n):
        keys = keys.index_select(1 + d, _windows(q.shape[1 + d], k).flatten()).unflatten(1 + d, (-1, k))
        keys = keys.movedim(2 + d, -1)
    keys = keys.flatten(2 + n - 1 + 1)
    weights = (q[..., None] * keys).sum(-2, keepdim=True).softmax(-1)
    return (weights * keys).sum(-1)


CLASSES += [
    case(f"neighbourhood attention of {n} dims, {k} wide, split at {d}", lambda x, k=k: _near(x, k),
         (1, *[(9,), (8, 6), (6, 5, 5)][n - 1], 2), at=d)
    for n, k in product((1, 2, 3), (3, 5)) for d in range(1, n + 1)
]  # fmt: skip


# --- points: nearest neighbours, balls, signed distances ---


def _nearest(points: Tensor, queries: Tensor) -> list[Tensor]:
    found = torch.cdist(queries, points).topk(4, largest=False)
    return [found.values, found.indices, points[found.indices].mean(1)]


def _ball(points: Tensor, queries: Tensor, most: int = 4) -> list[Tensor]:
    """Up to so many points within a radius of every query, their number, and the queries of every point."""
    apart = torch.cdist(queries, points)
    near = apart.masked_fill(apart > 1.5, torch.inf).topk(most, largest=False)
    inside = near.values.isfinite()
    index = near.indices.where(inside, 0)
    if points.dim() == 2:
        features = points[index]
    else:
        features = points.gather(1, index.flatten(1)[..., None].expand(-1, -1, 3)).unflatten(1, (-1, most))
    return [inside.sum(-1), (features * inside[..., None]).sum(-2), (apart <= 1.5).sum(-2)]


def _signed(faces: Tensor, queries: Tensor) -> list[Tensor]:
    """Distance to the nearest face's centre, negative behind it; faces are `[face, corner, xyz]`."""
    centre = faces.mean(1)
    normal = torch.linalg.cross(faces[:, 1] - faces[:, 0], faces[:, 2] - faces[:, 0])
    face = torch.cdist(queries, centre).argmin(1)
    way = queries - centre[face]
    return [way.norm(dim=-1) * (way * normal[face]).sum(-1).sign(), face, centre[face]]


BOTH = {"points": {0: 0}, "queries": {1: 0}, "both": {0: 0, 1: 0}}
CLASSES += [
    case(f"{name} of split {what}", call, shape, QUERIES, at=at)
    for (name, call, shape), (what, at) in product(
        [("nearest points", _nearest, POINTS), ("points in a ball", _ball, POINTS), ("signed distances", _signed, (7, 3, 3))],
        BOTH.items(),
    )
]  # fmt: skip
CLASSES += [
    case(f"points in a ball of {b} samples, split {what}", _ball, (b, *POINTS), (b, *QUERIES),
         at=dict.fromkeys(at, 1))
    for b, (what, at) in product((1, 2), BOTH.items())
]  # fmt: skip
CLASSES += [
    case("means of cells", lambda x, i: (torch.zeros(4, 3).double().index_add(0, i, x), torch.bincount(i, minlength=4)), POINTS, ints(4, 11), at={0: 0, 1: 0}),
    case("messages along edges", lambda x, i, j: torch.zeros_like(x).index_add(0, j, (x[i] - x[j]).tanh()), POINTS, ints(11, 20), ints(11, 20), at={0: 0, 1: 0, 2: 0}),
    case("messages along whole edges", lambda x, i, j: torch.zeros_like(x).index_add(0, j, x[i] * 2), POINTS, ints(11, 20), ints(11, 20), at=0),
    case("points onto a grid", lambda x, f: F.grid_sample(f, x.tanh().view(1, 11, 1, 1, 3), align_corners=True), POINTS, (1, 2, 5, 4, 6), at=0),
]  # fmt: skip

# --- products, norms, attention ---
CLASSES += [
    case(f"linear of {n} points, {len(lead) + 2} dims, bias {bias}",
         lambda x, w, b, bias=bias: F.linear(x, w, b if bias else None), (*lead, n, 6), (5, 6), (5,), at=len(lead))
    for n, lead, bias in all_pairs(product((8, 11), ((2,), (2, 3)), (False, True)))
]  # fmt: skip
CLASSES += [
    case(f"group_norm of {g} groups, affine {affine}",
         lambda x, w, b, g=g, affine=affine: F.group_norm(x, g, *(w, b) if affine else ()),
         (2, 4, *SIZES[2]), (4,), (4,), at={0: (2, 3)})
    for g, affine in product((1, 2, 4), (False, True))
]  # fmt: skip
CLASSES += [
    case(f"{kind}_norm of a volume", lambda x, kind=kind, more=more: getattr(F, f"{kind}_norm")(x, *more), (2, 4, *SIZES[3]),
         at={0: (2, 3)})
    for kind, more in (("instance", ()), ("batch", (None, None, None, None, True)))
]  # fmt: skip
CLASSES += [
    case(f"attention of {b} samples of {d} features, {what}{', causal' if causal else ''}",
         lambda q, k, causal=causal: F.scaled_dot_product_attention(q, k, k + 1, is_causal=causal, scale=0.4),
         (b, 2, nq, d), (b, 2, nk, d), at=at)
    for (b, d), causal, (what, nq, nk, at) in _pairs(((1, 4), (3, 2)), (False, True), (
        ("all split", 9, 9, {0: 2, 1: 2}), ("split queries", 11, 5, {0: 2}), ("split keys", 5, 11, {1: 2}),
        ("other lengths", 7, 10, {0: 2, 1: 2})))
]  # fmt: skip

# --- reductions, one after the other too ---
REDUCE: dict[str, Any] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin, "var": torch.var, "std": torch.std,
    "norm": torch.linalg.vector_norm, "logsumexp": torch.logsumexp,
}  # fmt: skip
CLASSES += [
    case(f"{name} over every choice of dims, keepdim {keep}", lambda x, r=r, keep=keep: [
        r(x, dim=dim, keepdim=keep) for dim in (0, 1, -1, (0, 1), (1, 2), (0, 2), (0, 1, 2))], (2, 9, 4))
    for (name, r), keep in product(REDUCE.items(), (False, True))
]  # fmt: skip
CLASSES += [
    case(f"{a} and then {b}", lambda x, a=a, b=b: [
        REDUCE[b](REDUCE[a](x, dim=d), dim=e) for d, e in ((0, 0), (1, 0), (2, 1))], (2, 9, 4))
    for a, b in product(("sum", "mean", "amax", "var"), ("sum", "mean", "norm"))
]  # fmt: skip


def _spelled(old: Sequence[int], new: Sequence[int]) -> Any:
    return lambda x: [
        x.view(new), x.view(*new), x.reshape(new), x.reshape(*new), torch.reshape(x, list(new)),
        torch.reshape(x, shape=tuple(new)), x.view(new).view(old), x.reshape(new).exp().reshape(*old),
    ]  # fmt: skip


CLASSES += [
    case(f"view of {old} as {new}, split at {at}", _spelled(old, new), old, at=at)
    for old, new, at in [
        ((4, 9, 4, 2), (4, 9, 8), 1), ((4, 9, 8), (4, 9, 4, 2), 1), ((4, 9, 6), (4, 54), 1), ((4, 9, 4, 2), (4, -1, 8), 1),
        ((4, 9, 6), (36, 6), 1), ((4, 9, 6), (36, 6), 0), ((9, 8), (9, 2, 2, 2), 0), ((24,), (2, 3, 4), 0),
        ((2, 12, 6), (2, 3, 4, 6), 1), ((2, 12, 6), (24, 6), 2), ((2, 3, 9), (6, 9), 2), ((2, 3, 4, 5), (6, 20), 2),
        ((8, 6), (48,), 1), ((1, 9, 6), (9, 6), 1), ((9, 1, 6), (9, 6), 0), ((6, 6), (3, 12), 1),
    ]
]  # fmt: skip
CLASSES += [
    case(f"a dim at {d}", lambda x, d=d: [x.unsqueeze(d), torch.unsqueeze(x, d), x.unsqueeze(d).squeeze(d)], (2, 9, 4))
    for d in (0, 1, 2, 3, -1, -2)
]  # fmt: skip
CLASSES += [
    case(f"unbind, select and index_select along {d}", lambda x, d=d: [
        *x.unbind(d), x.select(d, 1), x.select(d, -1), x.index_select(d, torch.tensor([1, 0, 1, 3]))], (4, 9, 5))
    for d in (0, 1, 2)
]  # fmt: skip
CLASSES += [
    case("index_select by split places", lambda x, i: x.index_select(1, i), (2, 9, 4), ints(9, 7), at={1: 0}),
    case("index_select of both split", lambda x, i: x.index_select(1, i), (2, 9, 4), ints(9, 7), at={0: 1, 1: 0}),
    case("view in a shorter type", lambda x: x.detach().view(torch.int32).view(torch.float64), (2, 9, 4)),
    case("view of a split last dim in a shorter type", lambda x: x.detach().view(torch.int16), (5, 9), at=1),
    case("short integers", lambda i: [i[:, 3], i.sum(1), i.flip(1), i.amax(1), i * 2, i[:, [0, 5]]], lambda: torch.randint(99, (2, 9, 4)).short()),
    case("rfft2 of grids", lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=(13, 9)), (2, *SIZES[2]), at={0: (1, 2)}),
]  # fmt: skip
CLASSES += [
    case(f"a whole operand {name}", call, (2, 9, 4), (2, 9, 4))
    for name, call in {
        "after": lambda x, y: x + y * x - y / (x.abs() + 1),
        "before": lambda x, y: y - x * y + torch.maximum(y, x),
        "in a product": lambda x, y: y @ x.mT + x @ y.mT,
        "in a concatenation": lambda x, y: torch.cat([y, x, y], 1).softmax(1),
        "in a stack": lambda x, y: torch.stack([y, x]).sum(0),
        "in where": lambda x, y: torch.where(y > x, y, x),
        "in a loss": lambda x, y: F.mse_loss(y, x) + F.l1_loss(x, y),
        "in attention": lambda x, y: F.scaled_dot_product_attention(y, x, y),
    }.items()
]


# --- convolutions in groups, of which every rank has some ---
CLASSES += [
    case(f"conv{n}d of {g} groups, {name}", lambda x, w, b, n=n, g=g, k=k: getattr(F, f"conv{n}d")(x, w, b, padding="same", groups=g),
         (2, 8, *SIZES[n]), (16, 8 // g, *[k] * n), (16,), at=at)
    for (n, k), g, (name, at) in _pairs(((1, 2), (2, 3), (3, 1)), (8, 4), (
        ("all split", {0: 1, 1: 0, 2: 0}), ("weight whole", {0: 1}), ("input whole", {1: 0}),
        ("rows too", {0: (1, 2), 1: 0})))
]  # fmt: skip
CLASSES += [
    case(f"conv_transpose{n}d of {g} groups, {name}", lambda x, w, b, n=n, g=g: getattr(F, f"conv_transpose{n}d")(x, w, b, 2, groups=g),
         (2, 8, *SIZES[n]), (8, 2, *[3] * n), (2 * g,), at=at)
    for n, g, (name, at) in _pairs((1, 2), (8, 4), (
        ("all split", {0: 1, 1: 0}), ("weight whole", {0: 1}), ("input whole", {1: 0})))
]  # fmt: skip


# --- options that are seldom used ---
CLASSES += [
    case("conv2d of split channels and rows", lambda x, w, b: F.conv2d(x, w, b, padding=1), (1, 4, 8, 4), (1, 4, 3, 3), (1,), at={0: (2, 1)}),
    case("constant_pad_nd", lambda x: torch.constant_pad_nd(x, (1, 0, 2, 3), 3.0), (2, 9, 4)),
    case("circular padding wider than the dim", lambda x: _fails(lambda: F.pad(x, (0, 0, 12, 0), mode="circular")), (2, 4, 9, 4), at=2),
    case("cross_entropy of split classes, summed or not", lambda x, t: [F.cross_entropy(x, t, reduction=how) for how in ("none", "sum")], (7, 9), ints(9, 7), at=1),
    case("cross_entropy of split classes, smoothed, with weights", lambda x, t, w: [
        F.cross_entropy(x.mT, t, w.detach().abs(), ignore_index=2, label_smoothing=0.1, reduction=how)
        for how in ("none", "sum", "mean")] + [F.cross_entropy(x.mT, t, label_smoothing=0.3)],
         (2, 5, 9), ints(9, 2, 5), (9,), at=2),
    case("batch_norm of split channels, with running statistics", lambda x, w, b: _tracked(x, w, b), (3, 8, 5), (8,), (8,), at={0: 1, 1: 0, 2: 0}),
    case("nll_loss of split classes with weights", lambda x, t, w: F.nll_loss(x, t, w.detach().abs()), (7, 9), ints(9, 7), (9,), at=1),
    case("embedding with split rows and padding", lambda i, w: F.embedding(i, w, padding_idx=2), ints(9, 2, 7), (9, 3), at={1: 0}),
    case("embedding with split rows, scaled", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), ints(9, 2, 7), (9, 3), at={1: 0}, refused="scaled"),
    case("embedding of split places, scaled", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), ints(9, 2, 7), (9, 3), at={0: 1}, refused="scaled"),
    case("bernoulli of certain values", lambda x: torch.bernoulli((x > 0).double()), (2, 9, 4)),
    case("uniform_ of one value", lambda x: (x * 1).detach().uniform_(2.0, 2.0), (2, 9, 4)),
    case("spread without a correction", lambda x: [x.std(False), x.var(False), torch.std_mean(x, 1, unbiased=False)], (2, 9, 4)),
    case("norm of order 0", lambda x: torch.linalg.vector_norm(x.round(), 0, dim=1), (2, 9, 4)),
    case("frobenius_norm", lambda x: [torch.frobenius_norm(x, [1, 2]), torch.norm(x, "fro"), x.norm("fro", dim=(1, 2))], (2, 9, 4)),
    case("histc without a range", lambda x: torch.histc(x, 4), (9, 4), at=0),
    case("vdot and ger", lambda x, y: torch.vdot(x, y) * torch.ger(x, y), (9,), (9,), at={0: 0, 1: 0}),
    case("cat with an empty tensor of one dim", lambda x: torch.cat([torch.empty(0).double(), x], 1), (2, 9, 4)),
    case("index_put of split places along another split", lambda x, i, s: x.index_put((i,), s, accumulate=True), (4, 9), ints(4, 8), (8, 9), at={0: 1, 1: 0, 2: 0}),
    case("attention of few queries, dropped and causal", lambda q, k: F.scaled_dot_product_attention(
        q, k, k, dropout_p=1.0, is_causal=True), (2, 3, 9, 4), (2, 3, 9, 4), at={0: 2, 1: 2}),
    case("attention of split heads by split rows", lambda q, k: F.scaled_dot_product_attention(q, k, k), (2, 4, 9, 4), (2, 4, 9, 4), at={0: 1, 1: 2}),
    case("sums of tensors split along each other's dims", lambda x, y: x + y * x, (2, 9, 8), (2, 9, 8), at={0: (1, 2), 1: (2, 1)}),
]  # fmt: skip


def _fails(call: Any) -> bool:
    try:
        call()
    except (RuntimeError, ShardError):
        return True
    return False


def _split(x: Any, **how: Any) -> Any:
    return x.redistribute(**how) if isinstance(x, ShardedTensor) else x


CLASSES += [
    case("split and split back", lambda x: _split(_split(x * 2, dim=2), dim=-2).cumsum(2), (2, 9, 8)),
    case("split in sizes that do not add up", lambda x: _split(x, dim=1, sizes=[1]), (2, 9, 4), refused="redistribute"),
    case("whole by hand", lambda x: (x.full_tensor() if isinstance(x, ShardedTensor) else x).sum(1) + x.mean(), (2, 9, 4)),
]  # fmt: skip


class _Slices(nn.Module):
    """Attention among a few weighted means of points, which go back to the points."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.mix = nn.Linear(6, 4), nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(x).softmax(-1)
        means = torch.einsum("bns,bnd->bsd", weights, x) / (weights.sum(1)[..., None] + 1e-5)
        q, k, v = self.mix(means).chunk(3, -1)
        return torch.einsum("bns,bsd->bnd", weights, F.scaled_dot_product_attention(q, k, v)) + x


class _Latents(nn.Module):
    """A few trained rows read all points, and all points read them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Parameter(torch.zeros(2, 3, 3)), nn.LayerNorm(6)
        self.mix = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.mix(self.norm(x)).unflatten(-1, (2, 2, 3)).permute(2, 0, 3, 1, 4)
        q = self.rows.expand(x.shape[0], -1, -1, -1)
        read = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return F.scaled_dot_product_attention(k, q, read, scale=1.0).transpose(1, 2).flatten(2) + x


class _Modulated(nn.Module):
    """A transformer block over patches, scaled and shifted by a condition of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.condition = nn.Conv2d(2, 6, 2, 2), nn.Linear(3, 18)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, gate = self.condition(x.mean((2, 3))[:, [0, 1, 0]]).unsqueeze(1).chunk(3, -1)
        rows = self.patch(x).flatten(2).transpose(1, 2)
        rows = rows + gate * self.attend(*[F.layer_norm(rows, (6,)) * (1 + scale) + shift] * 3)[0]
        return F.pixel_shuffle(F.pad(rows, (0, 2)).mT.unflatten(-1, (x.shape[2] // 2, -1)), 2)


class _Volumes(nn.Module):
    """A U-Net of one level over a volume, with attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(2, 4, 3, 2, 1), nn.ConvTranspose3d(4, 2, 2, 2)
        self.norm, self.mix = nn.GroupNorm(2, 4), nn.Conv3d(4, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = F.silu(self.norm(self.down(x)))
        q, k, v = self.mix(low).flatten(2).unflatten(1, (3, 2, 2)).mT.unbind(1)
        low = low + F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2).unflatten(2, low.shape[2:])
        return torch.cat([self.up(low), x], 1)


class _Around(nn.Module):
    """Points in balls around the places of a grid, convolved, and read back at the points."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Linear(3, 2), nn.Conv3d(2, 2, 3, padding=1)

    def forward(self, points: Tensor) -> Tensor:
        line = torch.linspace(-1, 1, 4, dtype=points.dtype)
        grid = torch.stack(torch.meshgrid(line, line, line, indexing="ij"), -1)
        near = (torch.cdist(grid.flatten(0, 2), points) < 1).to(points.dtype)
        field = (near @ self.embed(points) / near.sum(1, keepdim=True).clamp(min=1)).T.view(1, 2, 4, 4, 4)
        places = points.tanh().view(1, 1, 1, -1, 3)
        return F.grid_sample(self.conv(field), places, align_corners=True).flatten(1).T


def _model(kind: type[nn.Module]) -> Any:
    def call(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        for p in (layer := kind().double()).parameters():
            nn.init.normal_(p, std=0.3)
        return layer(x)

    return call


CLASSES += [
    case(f"model{kind.__name__}", _model(kind), shape, at=at)
    for kind, shape, at in [
        (_Slices, (2, 11, 6), 1), (_Latents, (2, 11, 6), 1), (_Modulated, (2, 2, 10, 8), 2),
        (_Volumes, (1, 2, 12, 8, 4), {0: (2, 3)}), (_Around, (11, 3), 0),
    ]
]  # fmt: skip
