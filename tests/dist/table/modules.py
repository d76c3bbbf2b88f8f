"""Modules of torch.nn as they are, in training and in evaluation, and autocast."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.table.case import case

X = (2, 9, 6)


def _encoders(**options):
    layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options)


def _padding():
    return torch.arange(9) >= torch.tensor([[9], [6]])


def _decoded(x, y):
    mask = nn.Transformer.generate_square_subsequent_mask(7).double()
    return _layer(nn.Transformer(6, 2, 1, 1, 12, 0.0, batch_first=True), x, y, tgt_is_causal=True, tgt_mask=mask)


def _without_gradients(layer, x, *args, **options):
    with torch.no_grad():
        return _layer(layer.eval(), x.detach(), *args, **options)


def _convolutions(x):
    first = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    norms = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.ReLU(True)
    scales = nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.ConvTranspose2d(4, 4, 2, 2)
    return _layer(nn.Sequential(first, *norms, *scales, nn.AdaptiveAvgPool2d((4, 3)), nn.Flatten()), x)


def _paddings(x):
    pads = nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.ZeroPad2d(1), nn.CircularPad2d(1)
    return _layer(nn.Sequential(*pads, nn.PixelUnshuffle(2), nn.Unfold(2)), x)


MODULES = [
    case("encoder layer", lambda x: _layer(_encoders().layers[0], x), X),
    case("encoder with padding", lambda x, p: _layer(_encoders(), x, src_key_padding_mask=p), X, _padding, at={0: 1, 1: 1}),
    case("encoder with padding in evaluation, which may drop it", lambda x, p: _without_gradients(
        _encoders(enable_nested_tensor=True), x, src_key_padding_mask=p) * ~p[..., None], X, _padding, at={0: 1, 1: 1}),
    case("encoder and decoder", _decoded, X, (2, 7, 6), at={0: 1, 1: 1}),
    case("multi-head attention in evaluation", lambda x: _without_gradients(nn.MultiheadAttention(6, 2, batch_first=True), x, x, x, need_weights=False), X),
    case("multi-head attention with bias_kv", lambda x: _layer(nn.MultiheadAttention(6, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True), x, x, x), X),
    case("normalisation layers", lambda x: _layer(nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6)), x), X),
    case("convolution layers", _convolutions, (2, 4, 12, 9), at=2),
    case("padding layers", _paddings, (2, 4, 12, 6), at=2),
    case("weight norm", lambda x: _layer(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), x), X),
    case("bfloat16 by autocast", lambda x: _autocast(x), X, tolerance=0.05),
]  # fmt: skip


def _layer(layer, *args, **kwargs):
    torch.manual_seed(5)
    layer = layer.double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer(*args, **kwargs)


def _autocast(x):
    x = x.float()
    with torch.autocast("cpu", torch.bfloat16):
        w = torch.linspace(-1, 1, 36).view(6, 6)
        h = F.linear(x, w, w[0])
        s = (h @ h.mT).softmax(-1) @ h
        a = F.scaled_dot_product_attention(h, h, h)
        n = F.layer_norm(s + a, (9, 6)) + F.linear(x.mT, torch.ones(9, 9) / 9, torch.ones(9)).mT
        c = F.conv1d(x.mT, torch.ones(6, 6, 3) / 18, torch.ones(6), padding=1).mT
        loss = F.mse_loss(h, x) + F.cross_entropy(h.flatten(0, 1), torch.arange(18) % 6)
        found = [h, s, a, n, c, loss, x @ w, torch.addmm(w[0], x[0], w), x.mT @ x, F.group_norm(x, 3)]
    return [[t.dtype for t in found], [t.double() for t in found]]
