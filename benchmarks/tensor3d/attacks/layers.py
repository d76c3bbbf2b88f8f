"""Attacks by layers of torch.nn, and what is built of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor3d.small import attack
from tests.odd_modules.collection.networks import heads
from tests.odd_modules.collection.row import both, features, lin, par

X, SEQ, IMAGE = features(6), features(5, 8), features(4, 8, 6)


def _mask(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def _attend(m: Any, x: Tensor, **given: Any) -> Tensor:
    return m.mix(x, x, x, **given)[0]


def _grouped(m: Any, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q = m.q(x).view(b, n, 4, 2).transpose(1, 2)
    k, v = m.kv(x).view(b, n, 2, 2, 2).permute(2, 0, 3, 1, 4)
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


def _linear_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (one(x).unflatten(-1, (2, 4)) for one in (m.q, m.k, m.v))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bnhd,bnhe->bhde", k, v)
    return m.out(torch.einsum("bnhd,bhde,bhd->bnhe", q, state, 1 / k.sum(1)).flatten(2))


def _latents(m: Any, x: Tensor) -> Tensor:
    start = m.latents.expand(len(x), -1, -1)
    return m.head(m.mix(start, x, x, need_weights=False)[0].mean(1))


def _class_token(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.places[:, : x.shape[1] + 1]
    return m.head(m.block(x)[:, 0])


def _recurrent(m: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), 7)
    for row in x.unbind(1):
        state = torch.tanh(m.inner(row) + m.again(state))
    return m.out(state)


def _cells(m: Any, x: Tensor) -> Tensor:
    h, c = x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)
    for row in x.unbind(1):
        h, c = m.cell(row, (h, c))
    return m.out(h)


def _gru_cell(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 6)
    for row in x.unbind(1):
        h = m.cell(row, h)
    return m.out(h)


def _scan(m: Any, x: Tensor) -> Tensor:
    """A selective state space, step by step."""
    z, step, b, c = m.inner(x).split([8, 8, 3, 3], -1)
    state, out = x.new_zeros(len(x), 8, 3), []
    for t in range(x.shape[1]):
        decay = torch.exp(-F.softplus(step[:, t])[..., None] * m.rate.exp())
        state = decay * state + z[:, t, :, None] * b[:, t, None]
        out.append((state * c[:, t, None]).sum(-1))
    return m.out(torch.stack(out, 1) * F.silu(z))


def _packed(m: Any, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m.net(packed)[0], batch_first=True)[0]


def _encoder(norm_first: bool, **given: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first, **given)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _mha(**given: Any) -> Any:
    return lambda: nn.MultiheadAttention(8, 2, batch_first=True, **given)


LAYERS = [
    attack(
        "layer norm over split features",
        SEQ,
        lambda m, x: m.c(m.n(m.b(m.a(x)))),
        a=lin(8, 8),
        b=lin(8, 7),
        n=lambda: nn.LayerNorm(7),
        c=lin(7, 3),
    ),
    attack(
        "RMS norm over split features",
        SEQ,
        lambda m, x: m.b(m.n(m.a(x))),
        a=lin(8, 7),
        n=lambda: nn.RMSNorm(7),
        b=lin(7, 3),
    ),
    attack(
        "layer norm over two dims",
        SEQ,
        lambda m, x: m.b(m.n(m.a(x))),
        a=lin(8, 6),
        n=lambda: nn.LayerNorm((5, 6)),
        b=lin(6, 3),
    ),
    attack(
        "a norm written by hand",
        SEQ,
        lambda m, x: m.b((h := m.a(x)) / (h.std(-1, keepdim=True, correction=0) + 1)),
        a=lin(8, 7),
        b=lin(7, 3),
    ),
    attack("LSTM", SEQ, lambda m, x: m.net(x)[0], net=lambda: nn.LSTM(8, 6, batch_first=True)),
    attack(
        "GRU of two layers, both ways",
        SEQ,
        lambda m, x: m.net(x)[0],
        net=lambda: nn.GRU(8, 6, 2, batch_first=True, bidirectional=True),
    ),
    attack(
        "RNN",
        SEQ,
        lambda m, x: m.out(m.net(m.inner(x))[0]),
        inner=lin(8, 6),
        net=lambda: nn.RNN(6, 6, batch_first=True),
        out=lin(6, 2),
    ),
    attack("packed LSTM", SEQ, _packed, net=lambda: nn.LSTM(8, 6, batch_first=True)),
    attack("LSTM cells", SEQ, _cells, cell=lambda: nn.LSTMCell(8, 6), out=lin(6, 3)),
    attack("GRU cells", SEQ, _gru_cell, cell=lambda: nn.GRUCell(8, 6), out=lin(6, 3)),
    attack("recurrence by hand", SEQ, _recurrent, inner=lin(8, 7), again=lin(7, 7), out=lin(7, 3)),
    attack("a state space, step by step", SEQ, _scan, inner=lin(8, 22), rate=par(8, 3), out=lin(8, 4)),
    attack("multihead attention", SEQ, _attend, mix=_mha()),
    attack(
        "multihead attention with weights in the loss",
        SEQ,
        lambda m, x: (f := m.mix(x, x, x))[0].mean() + f[1].square().sum((1, 2)).mean(),
        mix=_mha(),
    ),
    attack(
        "multihead attention with padding",
        SEQ,
        lambda m, x: _attend(m, x, key_padding_mask=torch.arange(5).expand(len(x), 5) > 2, need_weights=False),
        mix=_mha(),
    ),
    attack(
        "multihead attention with a mask",
        SEQ,
        lambda m, x: _attend(m, x, attn_mask=_mask(5), need_weights=False),
        mix=_mha(),
    ),
    attack(
        "multihead attention of other widths",
        both(SEQ, features(3, 6)),
        lambda m, xy: m.mix(xy[0], xy[1], xy[1])[0],
        mix=_mha(kdim=6, vdim=6),
    ),
    attack("multihead attention with more keys", SEQ, _attend, mix=_mha(add_bias_kv=True, add_zero_attn=True)),
    attack("attention with rotation and a trained bias", SEQ, heads, qkv=lin(8, 24), bias=par(2, 7, 7), out=lin(8, 8)),
    attack("grouped queries", SEQ, _grouped, q=lin(8, 8), kv=lin(8, 8), out=lin(8, 8)),
    attack("linear attention", SEQ, _linear_attention, q=lin(8, 8), k=lin(8, 8), v=lin(8, 8), out=lin(8, 8)),
    attack("latents that attend", SEQ, _latents, latents=par(1, 3, 8), mix=_mha(), head=lin(8, 2)),
    attack(
        "a class token and places",
        SEQ,
        _class_token,
        token=par(1, 1, 8),
        places=par(1, 9, 8),
        block=lambda: _encoder(True),
        head=lin(8, 2),
    ),
    attack("TransformerEncoder, norm first", SEQ, lambda m, x: m.net(x), net=lambda: _encoder(True)),
    attack(
        "TransformerEncoder, norm last, GELU",
        SEQ,
        lambda m, x: m.net(x),
        net=lambda: _encoder(False, activation="gelu"),
    ),
    attack(
        "TransformerEncoder with a causal mask",
        SEQ,
        lambda m, x: m.net(x, mask=nn.Transformer.generate_square_subsequent_mask(5).double(), is_causal=True),
        net=lambda: _encoder(True),
    ),
    attack(
        "TransformerEncoder with padding",
        SEQ,
        lambda m, x: m.net(x, src_key_padding_mask=torch.arange(5).expand(len(x), 5) > 3),
        net=lambda: _encoder(True),
    ),
    attack(
        "Transformer",
        both(SEQ, features(3, 8)),
        lambda m, xy: m.net(*xy, tgt_mask=nn.Transformer.generate_square_subsequent_mask(3).double()),
        net=lambda: nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True),
    ),
]
