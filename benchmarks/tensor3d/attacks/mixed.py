"""Attacks by layers that mix features in odd ways, and by random numbers and statistics."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor3d.small import attack
from tests.odd_modules.collection.networks import message
from tests.odd_modules.collection.row import both, buf, features, lin, par

X, SEQ, IMAGE = features(6), features(5, 8), features(4, 8, 6)


def _conv(*args: int, **given: Any) -> Any:
    return lambda: nn.Conv2d(*args, **given)


def _attend(m: Any, x: Tensor, **given: Any) -> Tensor:
    return m.mix(x, x, x, **given)[0]


def _mixer(m: Any, x: Tensor) -> Tensor:
    x = x + m.over_tokens(m.first(x).mT).mT
    return x + m.over_features(m.second(x))


def _scattered(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    place = torch.tensor([0, 1, 1, 2, 0, 3, 2, 1]).expand_as(h)
    return m.two(torch.zeros_like(h[..., :4]).scatter_add(-1, place, h))


def _slots(m: Any, x: Tensor) -> Tensor:
    slots, keys, values = m.start.expand(len(x), -1, -1), m.k(x), m.v(x)
    for _ in range(2):
        share = (m.q(slots) @ keys.mT / 3).softmax(1) + 1e-8
        got = (share / share.sum(-1, keepdim=True)) @ values
        slots = m.cell(got.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
    return m.out(slots)


def _capsules(m: Any, x: Tensor) -> Tensor:
    votes = torch.einsum("bni,nkoi->bnko", x, m.w)
    share = votes.new_zeros(votes.shape[:3])
    for _ in range(2):
        out = torch.einsum("bnk,bnko->bko", share.softmax(-1), votes)
        out = out * out.norm(dim=-1, keepdim=True) / (1 + out.square().sum(-1, keepdim=True))
        share = share + torch.einsum("bnko,bko->bnk", votes, out)
    return out


def _mha(**given: Any) -> Any:
    return lambda: nn.MultiheadAttention(8, 2, batch_first=True, **given)


def _running(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - m.mean


def _assigned(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return x - m.mean


MIXED = [
    attack(
        "a gated layer", X, lambda m, x: m.b(F.silu((h := m.a(x).chunk(2, -1))[0]) * h[1]), a=lin(6, 14), b=lin(7, 3)
    ),
    attack(
        "a gated layer, every second feature",
        X,
        lambda m, x: m.b(F.silu((h := m.a(x))[..., ::2]) * h[..., 1::2]),
        a=lin(6, 14),
        b=lin(7, 3),
    ),
    attack("maxout", X, lambda m, x: m.b(m.a(x).view(-1, 5, 3).amax(-1)), a=lin(6, 15), b=lin(5, 3)),
    attack(
        "mixer over tokens",
        SEQ,
        _mixer,
        first=lambda: nn.LayerNorm(8),
        second=lambda: nn.LayerNorm(8),
        over_tokens=lambda: nn.Sequential(lin(5, 7)(), nn.GELU(), lin(7, 5)()),
        over_features=lambda: nn.Sequential(lin(8, 9)(), nn.GELU(), lin(9, 8)()),
    ),
    attack("highway", X, lambda m, x: (g := m.g(x).sigmoid()) * m.a(x).relu() + (1 - g) * x, g=lin(6, 6), a=lin(6, 6)),
    attack(
        "dense connections",
        X,
        lambda m, x: m.c(torch.cat([x, h := m.a(x).relu(), m.b(torch.cat([x, h], 1)).relu()], 1)),
        a=lin(6, 5),
        b=lin(11, 7),
        c=lin(18, 3),
    ),
    attack(
        "siamese rows",
        both(X, X),
        lambda m, xy: F.cosine_similarity(m.b(m.a(xy[0]).relu()), m.b(m.a(xy[1]).relu())),
        a=lin(6, 8),
        b=lin(8, 5),
    ),
    attack("messages on a graph", SEQ, message, edge=lin(16, 8), node=lin(8, 3)),
    attack("scattered features", X, _scattered, one=lin(6, 8), two=lin(4, 3)),
    attack(
        "slots",
        SEQ,
        _slots,
        start=par(1, 3, 8),
        q=lin(8, 8),
        k=lin(8, 8),
        v=lin(8, 8),
        cell=lambda: nn.GRUCell(8, 8),
        out=lin(8, 2),
    ),
    attack("capsules", SEQ, _capsules, w=par(5, 3, 4, 8)),
    attack(
        "dropout of features", SEQ, lambda m, x: m.b(F.dropout(m.a(x), 0.3)), drawn=True, a=lin(8, 10), b=lin(10, 3)
    ),
    attack(
        "dropout of channels",
        IMAGE,
        lambda m, x: m.b(F.dropout2d(m.a(x), 0.3)),
        drawn=True,
        a=_conv(4, 8, 3),
        b=_conv(8, 2, 1),
    ),
    attack(
        "alpha dropout and random ReLU",
        SEQ,
        lambda m, x: m.b(F.rrelu(F.alpha_dropout(m.a(x), 0.3, True), training=True)),
        drawn=True,
        a=lin(8, 10),
        b=lin(10, 3),
    ),
    attack("attention dropout", SEQ, _attend, drawn=True, mix=_mha(dropout=0.4)),
    attack(
        "layers left out at random",
        SEQ,
        lambda m, x: m.c(m.a(x) if torch.rand(()) < 0.5 else m.b(x)),
        a=lin(8, 6),
        b=lin(8, 6),
        c=lin(6, 3),
    ),
    attack(
        "running mean of activations",
        X,
        lambda m, x: m.b(_running(m, m.a(x))),
        True,
        a=lin(6, 8),
        b=lin(8, 3),
        mean=buf(8),
    ),
    attack(
        "running mean, assigned", X, lambda m, x: m.b(_assigned(m, m.a(x))), True, a=lin(6, 8), b=lin(8, 3), mean=buf(8)
    ),
]
