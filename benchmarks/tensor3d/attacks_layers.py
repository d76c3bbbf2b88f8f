"""Attacks by layers of torch.nn, and what is built of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor3d.small import attack, both, buf, features, lin, par, words

X, SEQ, IMAGE = features(6), features(5, 8), features(4, 8, 6)
TOKENS = words(5)


def _conv(*args: int, **given: Any) -> Any:
    return lambda: nn.Conv2d(*args, **given)


def _mask(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def _attend(m: Any, x: Tensor, **given: Any) -> Tensor:
    return m.mix(x, x, x, **given)[0]


def _rotary(x: Tensor) -> Tensor:
    n, d = x.shape[-2:]
    at = torch.arange(n, dtype=x.dtype)[:, None] * 0.3 ** torch.arange(d // 2, dtype=x.dtype)
    turn = torch.polar(torch.ones_like(at), at)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], d // 2, 2)) * turn).flatten(-2)


def _heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    score = (_rotary(q) @ _rotary(k).mT) / 2 + m.bias[:, : x.shape[1], : x.shape[1]]
    return m.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


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


def _squeeze(m: Any, x: Tensor) -> Tensor:
    x = m.one(x)
    scale = m.up(m.down(x.mean((2, 3))).relu()).sigmoid()
    return m.two(x * scale[:, :, None, None])


def _mixer(m: Any, x: Tensor) -> Tensor:
    x = x + m.over_tokens(m.first(x).mT).mT
    return x + m.over_features(m.second(x))


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


def _message(m: Any, x: Tensor) -> Tensor:
    """A step of a graph net with edges between the tokens of each row."""
    source, target = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 2, 3, 4, 0, 2])
    sent = m.edge(torch.cat([x[:, source], x[:, target]], -1)).relu()
    return m.node(torch.zeros_like(sent[:, :5]).index_add(1, target, sent))


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


def _encoder(norm_first: bool, **given: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first, **given)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _mha(**given: Any) -> Any:
    return lambda: nn.MultiheadAttention(8, 2, batch_first=True, **given)


LAYERS = [
    attack("layer norm over split features", SEQ, lambda m, x: m.c(m.n(m.b(m.a(x)))), a=lin(8, 8), b=lin(8, 7), n=lambda: nn.LayerNorm(7), c=lin(7, 3)),
    attack("RMS norm over split features", SEQ, lambda m, x: m.b(m.n(m.a(x))), a=lin(8, 7), n=lambda: nn.RMSNorm(7), b=lin(7, 3)),
    attack("layer norm over two dims", SEQ, lambda m, x: m.b(m.n(m.a(x))), a=lin(8, 6), n=lambda: nn.LayerNorm((5, 6)), b=lin(6, 3)),
    attack("a norm written by hand", SEQ, lambda m, x: m.b((h := m.a(x)) / (h.std(-1, keepdim=True, correction=0) + 1)), a=lin(8, 7), b=lin(7, 3)),
    attack("LSTM", SEQ, lambda m, x: m.net(x)[0], net=lambda: nn.LSTM(8, 6, batch_first=True)),
    attack("GRU of two layers, both ways", SEQ, lambda m, x: m.net(x)[0], net=lambda: nn.GRU(8, 6, 2, batch_first=True, bidirectional=True)),
    attack("RNN", SEQ, lambda m, x: m.out(m.net(m.inner(x))[0]), inner=lin(8, 6), net=lambda: nn.RNN(6, 6, batch_first=True), out=lin(6, 2)),
    attack("packed LSTM", SEQ, _packed, net=lambda: nn.LSTM(8, 6, batch_first=True)),
    attack("LSTM cells", SEQ, _cells, cell=lambda: nn.LSTMCell(8, 6), out=lin(6, 3)),
    attack("GRU cells", SEQ, _gru_cell, cell=lambda: nn.GRUCell(8, 6), out=lin(6, 3)),
    attack("recurrence by hand", SEQ, _recurrent, inner=lin(8, 7), again=lin(7, 7), out=lin(7, 3)),
    attack("a state space, step by step", SEQ, _scan, inner=lin(8, 22), rate=par(8, 3), out=lin(8, 4)),
    attack("multihead attention", SEQ, _attend, mix=_mha()),
    attack("multihead attention with weights in the loss", SEQ, lambda m, x: (f := m.mix(x, x, x))[0].mean() + f[1].square().sum((1, 2)).mean(), mix=_mha()),
    attack("multihead attention with padding", SEQ, lambda m, x: _attend(m, x, key_padding_mask=torch.arange(5).expand(len(x), 5) > 2, need_weights=False), mix=_mha()),
    attack("multihead attention with a mask", SEQ, lambda m, x: _attend(m, x, attn_mask=_mask(5), need_weights=False), mix=_mha()),
    attack("multihead attention of other widths", both(SEQ, features(3, 6)), lambda m, xy: m.mix(xy[0], xy[1], xy[1])[0], mix=_mha(kdim=6, vdim=6)),
    attack("multihead attention with more keys", SEQ, _attend, mix=_mha(add_bias_kv=True, add_zero_attn=True)),
    attack("attention with rotation and a trained bias", SEQ, _heads, qkv=lin(8, 24), bias=par(2, 7, 7), out=lin(8, 8)),
    attack("grouped queries", SEQ, _grouped, q=lin(8, 8), kv=lin(8, 8), out=lin(8, 8)),
    attack("linear attention", SEQ, _linear_attention, q=lin(8, 8), k=lin(8, 8), v=lin(8, 8), out=lin(8, 8)),
    attack("latents that attend", SEQ, _latents, latents=par(1, 3, 8), mix=_mha(), head=lin(8, 2)),
    attack("a class token and places", SEQ, _class_token, token=par(1, 1, 8), places=par(1, 9, 8), block=lambda: _encoder(True), head=lin(8, 2)),
    attack("TransformerEncoder, norm first", SEQ, lambda m, x: m.net(x), net=lambda: _encoder(True)),
    attack("TransformerEncoder, norm last, GELU", SEQ, lambda m, x: m.net(x), net=lambda: _encoder(False, activation="gelu")),
    attack("TransformerEncoder with a causal mask", SEQ, lambda m, x: m.net(x, mask=nn.Transformer.generate_square_subsequent_mask(5).double(), is_causal=True), net=lambda: _encoder(True)),
    attack("TransformerEncoder with padding", SEQ, lambda m, x: m.net(x, src_key_padding_mask=torch.arange(5).expand(len(x), 5) > 3), net=lambda: _encoder(True)),
    attack("Transformer", both(SEQ, features(3, 8)), lambda m, xy: m.net(*xy, tgt_mask=nn.Transformer.generate_square_subsequent_mask(3).double()), net=lambda: nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True)),
    attack("embedding", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.Embedding(9, 6), out=lin(6, 3)),
    attack("embedding with padding", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.Embedding(9, 6, padding_idx=2), out=lin(6, 3)),
    attack("embedding with padding at the end", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.Embedding(9, 6, padding_idx=-1), out=lin(6, 3)),
    attack("embedding by frequency", TOKENS, lambda m, x: m.out(m.net(x)), True, net=lambda: nn.Embedding(9, 6, scale_grad_by_freq=True), out=lin(6, 3)),
    attack("embedding of bounded norm", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.Embedding(9, 6, max_norm=1.0), out=lin(6, 3)),
    attack("embedding read by index", TOKENS, lambda m, x: m.out(m.net.weight[x]), net=lambda: nn.Embedding(9, 6), out=lin(6, 3)),
    attack("embedding by one-hot", TOKENS, lambda m, x: m.out(F.one_hot(x, 9).double() @ m.net.weight), net=lambda: nn.Embedding(9, 6), out=lin(6, 3)),
    attack("bag of embeddings, sum", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.EmbeddingBag(9, 6, mode="sum"), out=lin(6, 3)),
    attack("bag of embeddings, mean", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.EmbeddingBag(9, 6, padding_idx=0), out=lin(6, 3)),
    attack("bag of embeddings, max", TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.EmbeddingBag(9, 6, mode="max"), out=lin(6, 3)),
    attack("fields of embeddings", words(3, most=5), lambda m, x: m.out(torch.cat([one(x[:, i]) for i, one in enumerate(m.many)], -1)), many=lambda: nn.ModuleList([nn.Embedding(5, n) for n in (3, 4, 2)]), out=lin(9, 3)),
    attack("bilinear layer", both(X, features(5)), lambda m, xy: m.net(*xy), net=lambda: nn.Bilinear(6, 5, 4)),
    attack("convolutions and group norm", IMAGE, lambda m, x: m.b(F.silu(m.n(m.a(x)))), a=_conv(4, 8, 3, padding=1), n=lambda: nn.GroupNorm(4, 8), b=_conv(8, 3, 3, stride=2)),
    attack("group norm of one group", IMAGE, lambda m, x: m.b(m.n(m.a(x))), a=_conv(4, 7, 3), n=lambda: nn.GroupNorm(1, 7), b=_conv(7, 3, 1)),
    attack("instance norm with weights", IMAGE, lambda m, x: m.b(m.n(m.a(x))), a=_conv(4, 6, 3), n=lambda: nn.InstanceNorm2d(6, affine=True), b=_conv(6, 3, 1)),
    attack("local response norm", IMAGE, lambda m, x: m.b(m.n(m.a(x))), a=_conv(4, 8, 3), n=lambda: nn.LocalResponseNorm(3), b=_conv(8, 3, 1)),
    attack("convolution in groups", IMAGE, lambda m, x: m.b(m.a(x)), a=_conv(4, 8, 3, groups=2), b=_conv(8, 3, 1)),
    attack("depthwise and pointwise", IMAGE, lambda m, x: m.c(m.b(m.a(x))), a=_conv(4, 8, 1), b=_conv(8, 8, 3, groups=8, padding=1), c=_conv(8, 3, 1)),
    attack("dilated convolution, circular padding", IMAGE, lambda m, x: m.b(m.a(x)), a=_conv(4, 6, 3, dilation=2, padding=2, padding_mode="circular"), b=_conv(6, 3, 3, padding="same", padding_mode="reflect")),
    attack("transposed convolutions", IMAGE, lambda m, x: m.b(m.a(x)), a=lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), b=lambda: nn.ConvTranspose2d(6, 4, 2, groups=2)),
    attack("convolution of one sample", X, lambda m, x: torch.stack([m.net(row[None])[..., 0] for row in x]), net=lambda: nn.Conv1d(1, 4, 6)),
    attack("convolution over time", SEQ, lambda m, x: m.b(F.glu(m.a(F.pad(x.mT, (2, 0))), 1).mT), a=lambda: nn.Conv1d(8, 12, 3), b=lin(6, 3)),
    attack("convolution in three dims", features(2, 4, 5, 6), lambda m, x: m.b(m.a(x)), a=lambda: nn.Conv3d(2, 6, 2), b=lambda: nn.Conv3d(6, 3, 1)),
    attack("pixel shuffle", IMAGE, lambda m, x: m.b(F.pixel_shuffle(m.a(x), 2)), a=_conv(4, 12, 3), b=_conv(3, 2, 3)),
    attack("pixel unshuffle", IMAGE, lambda m, x: m.b(F.pixel_unshuffle(m.a(x), 2)), a=_conv(4, 6, 1), b=_conv(24, 2, 1)),
    attack("shuffled channels", IMAGE, _shuffled, one=_conv(4, 8, 1), two=_conv(8, 3, 1, groups=1)),
    attack("squeeze and excite", IMAGE, _squeeze, one=_conv(4, 8, 3), down=lin(8, 3), up=lin(3, 8), two=_conv(8, 2, 1)),
    attack("a U-Net's skips", IMAGE, _skips, one=_conv(4, 6, 3, padding=1), n1=lambda: nn.GroupNorm(3, 6), two=_conv(6, 9, 3, padding=1), n2=lambda: nn.GroupNorm(3, 9), up=lambda: nn.ConvTranspose2d(9, 5, 2, 2), out=_conv(11, 2, 1)),
    attack("windows with relative places", IMAGE, _windows, one=_conv(4, 8, 1), qkv=lin(8, 24), table=par(15), out=lin(8, 3)),
    attack("unfolded patches", IMAGE, lambda m, x: m.b(m.a(F.unfold(x, 3).mT)), a=lin(36, 8), b=lin(8, 3)),
    attack("folded patches", IMAGE, lambda m, x: F.fold(m.a(F.unfold(x, 2, stride=2).mT).mT, (8, 6), 2, stride=2), a=lin(16, 12)),
    attack("pools over features", SEQ, lambda m, x: m.b(F.max_pool1d(m.a(x), 2) + F.avg_pool1d(m.a(x), 2)), a=lin(8, 12), b=lin(6, 3)),
    attack("adaptive pool over features", SEQ, lambda m, x: m.b(F.adaptive_avg_pool1d(m.a(x), 3)), a=lin(8, 10), b=lin(3, 3)),
    attack("interpolated features", SEQ, lambda m, x: m.b(F.interpolate(m.a(x), 9, mode="linear")), a=lin(8, 7), b=lin(9, 3)),
    attack("adaptive pools of images", IMAGE, lambda m, x: m.b(F.adaptive_max_pool2d(m.a(x), 2).flatten(1)), a=_conv(4, 6, 3), b=lin(24, 3)),
    attack("PReLU by channel", IMAGE, lambda m, x: m.b(m.p(m.a(x))), a=_conv(4, 6, 3), p=lambda: nn.PReLU(6), b=_conv(6, 2, 1)),
    attack("PReLU of features", X, lambda m, x: m.b(m.p(m.a(x))), a=lin(6, 8), p=lambda: nn.PReLU(8), b=lin(8, 2)),
    attack("GLU over features", X, lambda m, x: m.b(F.glu(m.a(x))), a=lin(6, 10), b=lin(5, 3)),
    attack("a gated layer", X, lambda m, x: m.b(F.silu((h := m.a(x).chunk(2, -1))[0]) * h[1]), a=lin(6, 14), b=lin(7, 3)),
    attack("a gated layer, every second feature", X, lambda m, x: m.b(F.silu((h := m.a(x))[..., ::2]) * h[..., 1::2]), a=lin(6, 14), b=lin(7, 3)),
    attack("maxout", X, lambda m, x: m.b(m.a(x).view(-1, 5, 3).amax(-1)), a=lin(6, 15), b=lin(5, 3)),
    attack("mixer over tokens", SEQ, _mixer, first=lambda: nn.LayerNorm(8), second=lambda: nn.LayerNorm(8), over_tokens=lambda: nn.Sequential(lin(5, 7)(), nn.GELU(), lin(7, 5)()), over_features=lambda: nn.Sequential(lin(8, 9)(), nn.GELU(), lin(9, 8)())),
    attack("highway", X, lambda m, x: (g := m.g(x).sigmoid()) * m.a(x).relu() + (1 - g) * x, g=lin(6, 6), a=lin(6, 6)),
    attack("dense connections", X, lambda m, x: m.c(torch.cat([x, h := m.a(x).relu(), m.b(torch.cat([x, h], 1)).relu()], 1)), a=lin(6, 5), b=lin(11, 7), c=lin(18, 3)),
    attack("siamese rows", both(X, X), lambda m, xy: F.cosine_similarity(m.b(m.a(xy[0]).relu()), m.b(m.a(xy[1]).relu())), a=lin(6, 8), b=lin(8, 5)),
    attack("messages on a graph", SEQ, _message, edge=lin(16, 8), node=lin(8, 3)),
    attack("scattered features", X, _scattered, one=lin(6, 8), two=lin(4, 3)),
    attack("slots", SEQ, _slots, start=par(1, 3, 8), q=lin(8, 8), k=lin(8, 8), v=lin(8, 8), cell=lambda: nn.GRUCell(8, 8), out=lin(8, 2)),
    attack("capsules", SEQ, _capsules, w=par(5, 3, 4, 8)),
    attack("dropout of features", SEQ, lambda m, x: m.b(F.dropout(m.a(x), 0.3)), drawn=True, a=lin(8, 10), b=lin(10, 3)),
    attack("dropout of channels", IMAGE, lambda m, x: m.b(F.dropout2d(m.a(x), 0.3)), drawn=True, a=_conv(4, 8, 3), b=_conv(8, 2, 1)),
    attack("alpha dropout and random ReLU", SEQ, lambda m, x: m.b(F.rrelu(F.alpha_dropout(m.a(x), 0.3, True), training=True)), drawn=True, a=lin(8, 10), b=lin(10, 3)),
    attack("attention dropout", SEQ, _attend, drawn=True, mix=_mha(dropout=0.4)),
    attack("layers left out at random", SEQ, lambda m, x: m.c(m.a(x) if torch.rand(()) < 0.5 else m.b(x)), a=lin(8, 6), b=lin(8, 6), c=lin(6, 3)),
    attack("running mean of activations", X, lambda m, x: m.b(_running(m, m.a(x))), True, a=lin(6, 8), b=lin(8, 3), mean=buf(8)),
    attack("running mean, assigned", X, lambda m, x: m.b(_assigned(m, m.a(x))), True, a=lin(6, 8), b=lin(8, 3), mean=buf(8)),
]


def _running(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - m.mean


def _assigned(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return x - m.mean
