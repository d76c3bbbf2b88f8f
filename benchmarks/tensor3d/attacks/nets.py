"""Attacks by embeddings, convolutions and nets that are built of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor3d.small import attack
from tests.odd_modules.collection.row import both, features, lin, par, words

X, SEQ, IMAGE = features(6), features(5, 8), features(4, 8, 6)


TOKENS = words(5)


def _conv(*args: int, **given: Any) -> Any:
    return lambda: nn.Conv2d(*args, **given)


def _squeeze(m: Any, x: Tensor) -> Tensor:
    x = m.one(x)
    scale = m.up(m.down(x.mean((2, 3))).relu()).sigmoid()
    return m.two(x * scale[:, :, None, None])


def _skips(m: Any, x: Tensor) -> Tensor:
    top = F.silu(m.n1(m.one(x)))
    low = F.silu(m.n2(m.two(F.max_pool2d(top, 2))))
    return m.out(torch.cat([top, m.up(low)], 1))


def _shuffled(m: Any, x: Tensor) -> Tensor:
    x = m.one(x).unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)
    return m.two(x)


def _windows(m: Any, x: Tensor) -> Tensor:
    """Attention in windows with a table of relative places."""
    b = len(x)
    parts = m.one(x).view(b, 8, 2, 4, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 8, 8)
    q, k, v = m.qkv(parts).chunk(3, -1)
    bias = m.table[(torch.arange(8)[:, None] - torch.arange(8)[None]) + 7]
    return m.out((q @ k.mT + bias).softmax(-1) @ v)


NETS = [
    attack("embedding", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.Embedding(9, 6), out=lin(6, 3)),
    attack(
        "embedding with padding",
        TOKENS,
        lambda m, x: m.out(m.net(x)),
        net=lambda: nn.Embedding(9, 6, padding_idx=2),
        out=lin(6, 3),
    ),
    attack(
        "embedding with padding at the end",
        TOKENS,
        lambda m, x: m.out(m.net(x)),
        net=lambda: nn.Embedding(9, 6, padding_idx=-1),
        out=lin(6, 3),
    ),
    attack(
        "embedding by frequency",
        TOKENS,
        lambda m, x: m.out(m.net(x)),
        True,
        net=lambda: nn.Embedding(9, 6, scale_grad_by_freq=True),
        out=lin(6, 3),
    ),
    attack(
        "embedding of bounded norm",
        TOKENS,
        lambda m, x: m.out(m.net(x)),
        net=lambda: nn.Embedding(9, 6, max_norm=1.0),
        out=lin(6, 3),
    ),
    attack(
        "embedding read by index",
        TOKENS,
        lambda m, x: m.out(m.net.weight[x]),
        net=lambda: nn.Embedding(9, 6),
        out=lin(6, 3),
    ),
    attack(
        "embedding by one-hot",
        TOKENS,
        lambda m, x: m.out(F.one_hot(x, 9).double() @ m.net.weight),
        net=lambda: nn.Embedding(9, 6),
        out=lin(6, 3),
    ),
    attack(
        "bag of embeddings, sum",
        TOKENS,
        lambda m, x: m.out(m.net(x)),
        net=lambda: nn.EmbeddingBag(9, 6, mode="sum"),
        out=lin(6, 3),
    ),
    attack(
        "bag of embeddings, mean",
        TOKENS,
        lambda m, x: m.out(m.net(x)),
        net=lambda: nn.EmbeddingBag(9, 6, padding_idx=0),
        out=lin(6, 3),
    ),
    attack(
        "bag of embeddings, max",
        TOKENS,
        lambda m, x: m.out(m.net(x)),
        net=lambda: nn.EmbeddingBag(9, 6, mode="max"),
        out=lin(6, 3),
    ),
    attack(
        "fields of embeddings",
        words(3, most=5),
        lambda m, x: m.out(torch.cat([one(x[:, i]) for i, one in enumerate(m.many)], -1)),
        many=lambda: nn.ModuleList([nn.Embedding(5, n) for n in (3, 4, 2)]),
        out=lin(9, 3),
    ),
    attack("bilinear layer", both(X, features(5)), lambda m, xy: m.net(*xy), net=lambda: nn.Bilinear(6, 5, 4)),
    attack(
        "convolutions and group norm",
        IMAGE,
        lambda m, x: m.b(F.silu(m.n(m.a(x)))),
        a=_conv(4, 8, 3, padding=1),
        n=lambda: nn.GroupNorm(4, 8),
        b=_conv(8, 3, 3, stride=2),
    ),
    attack(
        "group norm of one group",
        IMAGE,
        lambda m, x: m.b(m.n(m.a(x))),
        a=_conv(4, 7, 3),
        n=lambda: nn.GroupNorm(1, 7),
        b=_conv(7, 3, 1),
    ),
    attack(
        "instance norm with weights",
        IMAGE,
        lambda m, x: m.b(m.n(m.a(x))),
        a=_conv(4, 6, 3),
        n=lambda: nn.InstanceNorm2d(6, affine=True),
        b=_conv(6, 3, 1),
    ),
    attack(
        "local response norm",
        IMAGE,
        lambda m, x: m.b(m.n(m.a(x))),
        a=_conv(4, 8, 3),
        n=lambda: nn.LocalResponseNorm(3),
        b=_conv(8, 3, 1),
    ),
    attack("convolution in groups", IMAGE, lambda m, x: m.b(m.a(x)), a=_conv(4, 8, 3, groups=2), b=_conv(8, 3, 1)),
    attack(
        "depthwise and pointwise",
        IMAGE,
        lambda m, x: m.c(m.b(m.a(x))),
        a=_conv(4, 8, 1),
        b=_conv(8, 8, 3, groups=8, padding=1),
        c=_conv(8, 3, 1),
    ),
    attack(
        "dilated convolution, circular padding",
        IMAGE,
        lambda m, x: m.b(m.a(x)),
        a=_conv(4, 6, 3, dilation=2, padding=2, padding_mode="circular"),
        b=_conv(6, 3, 3, padding="same", padding_mode="reflect"),
    ),
    attack(
        "transposed convolutions",
        IMAGE,
        lambda m, x: m.b(m.a(x)),
        a=lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
        b=lambda: nn.ConvTranspose2d(6, 4, 2, groups=2),
    ),
    attack(
        "convolution of one sample",
        X,
        lambda m, x: torch.stack([m.net(row[None])[..., 0] for row in x]),
        net=lambda: nn.Conv1d(1, 4, 6),
    ),
    attack(
        "convolution over time",
        SEQ,
        lambda m, x: m.b(F.glu(m.a(F.pad(x.mT, (2, 0))), 1).mT),
        a=lambda: nn.Conv1d(8, 12, 3),
        b=lin(6, 3),
    ),
    attack(
        "convolution in three dims",
        features(2, 4, 5, 6),
        lambda m, x: m.b(m.a(x)),
        a=lambda: nn.Conv3d(2, 6, 2),
        b=lambda: nn.Conv3d(6, 3, 1),
    ),
    attack("pixel shuffle", IMAGE, lambda m, x: m.b(F.pixel_shuffle(m.a(x), 2)), a=_conv(4, 12, 3), b=_conv(3, 2, 3)),
    attack(
        "pixel unshuffle", IMAGE, lambda m, x: m.b(F.pixel_unshuffle(m.a(x), 2)), a=_conv(4, 6, 1), b=_conv(24, 2, 1)
    ),
    attack("shuffled channels", IMAGE, _shuffled, one=_conv(4, 8, 1), two=_conv(8, 3, 1, groups=1)),
    attack("squeeze and excite", IMAGE, _squeeze, one=_conv(4, 8, 3), down=lin(8, 3), up=lin(3, 8), two=_conv(8, 2, 1)),
    attack(
        "a U-Net's skips",
        IMAGE,
        _skips,
        one=_conv(4, 6, 3, padding=1),
        n1=lambda: nn.GroupNorm(3, 6),
        two=_conv(6, 9, 3, padding=1),
        n2=lambda: nn.GroupNorm(3, 9),
        up=lambda: nn.ConvTranspose2d(9, 5, 2, 2),
        out=_conv(11, 2, 1),
    ),
    attack(
        "windows with relative places",
        IMAGE,
        _windows,
        one=_conv(4, 8, 1),
        qkv=lin(8, 24),
        table=par(15),
        out=lin(8, 3),
    ),
    attack(
        "matrices of heads",
        SEQ,
        lambda m, x: m.a(x).unflatten(-1, (3, 1)).transpose(1, 2).tanh() @ m.w,
        a=lin(8, 3),
        w=par(3, 1, 4),
    ),
    attack("unfolded patches", IMAGE, lambda m, x: m.b(m.a(F.unfold(x, 3).mT)), a=lin(36, 8), b=lin(8, 3)),
    attack(
        "folded patches",
        IMAGE,
        lambda m, x: F.fold(m.a(F.unfold(x, 2, stride=2).mT).mT, (8, 6), 2, stride=2),
        a=lin(16, 12),
    ),
    attack(
        "pools over features",
        SEQ,
        lambda m, x: m.b(F.max_pool1d(m.a(x), 2) + F.avg_pool1d(m.a(x), 2)),
        a=lin(8, 12),
        b=lin(6, 3),
    ),
    attack(
        "adaptive pool over features",
        SEQ,
        lambda m, x: m.b(F.adaptive_avg_pool1d(m.a(x), 3)),
        a=lin(8, 10),
        b=lin(3, 3),
    ),
    attack(
        "interpolated features",
        SEQ,
        lambda m, x: m.b(F.interpolate(m.a(x), 9, mode="linear")),
        a=lin(8, 7),
        b=lin(9, 3),
    ),
    attack(
        "adaptive pools of images",
        IMAGE,
        lambda m, x: m.b(F.adaptive_max_pool2d(m.a(x), 2).flatten(1)),
        a=_conv(4, 6, 3),
        b=lin(24, 3),
    ),
    attack(
        "PReLU by channel",
        IMAGE,
        lambda m, x: m.b(m.p(m.a(x))),
        a=_conv(4, 6, 3),
        p=lambda: nn.PReLU(6),
        b=_conv(6, 2, 1),
    ),
    attack("PReLU of features", X, lambda m, x: m.b(m.p(m.a(x))), a=lin(6, 8), p=lambda: nn.PReLU(8), b=lin(8, 2)),
    attack("GLU over features", X, lambda m, x: m.b(F.glu(m.a(x))), a=lin(6, 10), b=lin(5, 3)),
]
