"""Small modules of several operators on split features: layers, networks and losses as people write them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd_modules.collection.row import (
    IMAGE,
    SEQ,
    TOKENS,
    Row,
    X,
    both,
    conv,
    features,
    lin,
    odd,
    of_features,
    par,
    two,
    words,
)


def _attends(drawn: bool = False, given: Mapping[str, Any] | None = None, **of: Any) -> Row:
    """Attention of two heads; `given` is made of the batch."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.mix(x, x, x, **{name: make(x) for name, make in (given or {}).items()})[0]

    return odd(SEQ, call, drawn=drawn, mix=lambda: nn.MultiheadAttention(8, 2, batch_first=True, **of))


def rotary(x: Tensor) -> Tensor:
    n, d = x.shape[-2:]
    at = torch.arange(n, dtype=x.dtype)[:, None] * 0.3 ** torch.arange(d // 2, dtype=x.dtype)
    turn = torch.polar(torch.ones_like(at), at)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], d // 2, 2)) * turn).flatten(-2)


def heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    score = (rotary(q) @ rotary(k).mT) / 2 + m.bias[:, : x.shape[1], : x.shape[1]]
    return m.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


def _cells(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 6)
    for row in x.unbind(1):
        h = m.cell(row, h)
    return m.out(h)


def message(m: Any, x: Tensor) -> Tensor:
    """A step of a graph net with edges between the tokens of each row."""
    source, target = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 2, 3, 4, 0, 2])
    sent = m.edge(torch.cat([x[:, source], x[:, target]], -1)).relu()
    return m.node(torch.zeros_like(sent[:, :5]).index_add(1, target, sent))


def _skips(m: Any, x: Tensor) -> Tensor:
    top = F.silu(m.norm(m.one(x)))
    return m.out(torch.cat([top, m.up(m.two(F.max_pool2d(top, 2)))], 1))


def fixed_point(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(50):
        new = torch.tanh(m.a(z) * 0.1 + x)
        if (new - z).norm() < 1e-3:
            break
        z = new
    return m.b(z)


def vae(m: Any, x: Tensor) -> Tensor:
    mean, log = m.encoder(x).chunk(2, -1)
    drawn = mean + torch.randn_like(mean) * (log / 2).exp()
    kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1)
    return (F.mse_loss(m.decoder(drawn), x, reduction="none").sum(-1) + kl).mean()


def written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).clone()
    h[:, 2] = 0
    h[:, 3:5] *= 2
    h[h > 1] = 0.5
    return m.b(h)


def _crf(m: Any, x: Tensor) -> Tensor:
    emit = m.a(x)
    alpha = emit[:, 0]
    for t in range(1, x.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + m.move, 1) + emit[:, t]
    return (torch.logsumexp(alpha, -1) - emit[..., 0].sum(1) - 4 * m.move[0, 0]).mean()


def _loss(call: Any, target: Any = None, by_rows: bool = False) -> Any:
    """A loss of features that a layer has split; of the batch's second tensor."""
    batch = both(X, target or features(5))
    says = {"pipeline": "it is no mean over samples"}
    return odd(batch, lambda m, xy: call(m.net(xy[0]), xy[1]), by_rows, says=says, net=two(6, 8, 5))


NETWORKS = {
    "LSTM": odd(SEQ, lambda m, x: m.net(x)[0], net=lambda: nn.LSTM(8, 6, batch_first=True)),
    "attention with a mask": _attends(given={"attn_mask": lambda x: torch.ones(5, 5, dtype=torch.bool).triu(1)}),
    "embedding of bounded norm": odd(TOKENS, lambda m, x: m.out(m.net(x)), says={
        "data": "parameters differ between ranks", "fsdp": "'net.weight' is gathered .* was changed in place",
        "sequence": "'embedding_renorm_' in", "tensor3d": "it writes into a copy"},
        net=lambda: nn.Embedding(9, 6, max_norm=1.0), out=lin(6, 3)),
    "bag of embeddings": odd(TOKENS, lambda m, x: m.out(m.net(x)), says={
        "sequence": "'embedding_bag' cannot be computed on parts"}, net=lambda: nn.EmbeddingBag(9, 6, padding_idx=0),
        out=lin(6, 3)),
    "circular and transposed convolutions": odd(IMAGE, lambda m, x: m.b(m.a(x)),
        a=conv(4, 6, 3, dilation=2, padding=2, padding_mode="circular"),
        b=lambda: nn.ConvTranspose2d(6, 4, 2, groups=2)),
    "layer norm over split features": odd(SEQ, lambda m, x: m.c(m.n(m.b(m.a(x)))), a=lin(8, 8), b=lin(8, 7),
        n=lambda: nn.LayerNorm(7), c=lin(7, 3)),
    "GRU cells": odd(SEQ, _cells, cell=lambda: nn.GRUCell(8, 6), out=lin(6, 3)),
    "attention dropout": odd(SEQ, lambda m, x: m.mix(x, x, x)[0], drawn=True,
        mix=lambda: nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.4)),
    "attention with rotation and a trained bias": odd(SEQ, heads, qkv=lin(8, 24), bias=par(2, 7, 7), out=lin(8, 8)),
    "a U-Net's skips": odd(IMAGE, _skips, one=conv(4, 6, 3, padding=1), norm=lambda: nn.GroupNorm(3, 6),
        two=conv(6, 9, 3, padding=1), up=lambda: nn.ConvTranspose2d(9, 5, 2, 2), out=conv(11, 2, 1)),
    "messages on a graph": odd(SEQ, message, edge=lin(16, 8), node=lin(8, 3)),
    "dropout of features": odd(SEQ, lambda m, x: m.b(F.dropout(m.a(x), 0.3)), drawn=True, a=lin(8, 10), b=lin(10, 3)),
    "sorted features": of_features(lambda h: h.sort(-1).values),
    "standardised features": of_features(lambda h: (h - h.mean(-1, keepdim=True)) / (h.std(-1) + 1)[:, None]),
    "greatest features": of_features(lambda h: h.topk(3, -1).values, 3),
    "a number of the host": of_features(lambda h: h * float(h.detach().mean()), by_rows=True),
    "written features": odd(X, written, a=lin(6, 8), b=lin(8, 3)),
    "a fixed point": odd(X, fixed_point, True, a=lin(6, 6), b=lin(6, 3)),
    "a variational autoencoder": odd(X, vae, drawn=True, encoder=lin(6, 10), decoder=lin(5, 6)),
    "a conditional random field": odd(SEQ, _crf, a=lin(8, 5), move=par(5, 5)),
    "cross-entropy with rows left out": _loss(lambda h, y: F.cross_entropy(h, y, ignore_index=2), words(most=5), True),
    "accuracy in the weight of the loss": _loss(lambda h,
        y: F.cross_entropy(h, y) * (1 + (h.argmax(-1) == y).double().mean()), words(most=5), True),
}  # fmt: skip
