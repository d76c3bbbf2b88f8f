"""Windows, norms, losses, and modules of torch.nn as they are, in training and in evaluation, and under autocast."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.sharding.table.case import case, ints

X = (2, 9, 6)
LINE = (2, 4, 13)
IMAGE = (2, 4, 12, 9)
VOLUME = (1, 2, 9, 5, 6)

LAYERS = [
    # --- convolutions ---
    case("conv1d without a batch", lambda x, w: F.conv1d(x, w, padding=2), (4, 13), (3, 4, 5), at=1),
    case("causal conv1d", lambda x, w: F.conv1d(F.pad(x, (4, 0)), w, dilation=2), LINE, (3, 4, 3), at=2),
    case("depthwise conv1d", lambda x, w: F.conv1d(x, w, padding="same", groups=4), LINE, (4, 1, 5), at=2),
    case("conv2d by names", lambda x, w: F.conv2d(input=x, weight=w, stride=(2, 1), padding=(2, 0)), IMAGE, (3, 4, 5, 3), at=2),
    case("conv2d with dilation", lambda x, w: F.conv2d(x, w, dilation=2, padding="same"), IMAGE, (3, 4, 3, 3), at=2),
    case("conv2d in patches", lambda x, w, b: F.conv2d(x, w, b, stride=3), IMAGE, (3, 4, 3, 3), (3,), at=2),
    case("conv2d of split channels", lambda x, w, b: F.conv2d(x, w, b), (2, 8, 5, 4), (3, 8, 3, 3), (3,), at=1),
    case("conv2d with split weight", lambda x, w, b: F.conv2d(x, w, b), IMAGE, (8, 4, 3, 3), (8,), at={1: 0, 2: 0}),
    case("conv3d", lambda x, w, b: F.conv3d(x, w, b, padding=1), VOLUME, (3, 2, 3, 3, 3), (3,), at=2),
    case("conv with replicated padding", lambda x, w: _conv(x, w, "replicate"), IMAGE, (3, 4, 3, 3), at=2),
    case("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, 2), LINE, (4, 3, 4), (3,), at=2),
    case("conv_transpose2d by names", lambda x, w: F.conv_transpose2d(x, w, padding=1, dilation=2), IMAGE, (4, 3, 3, 3), at=2),
    case("conv_transpose2d in groups", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, groups=2), IMAGE, (4, 3, 2, 2), (6,), at=2),
    case("conv_transpose3d", lambda x, w, b: F.conv_transpose3d(x, w, b, 2), VOLUME, (2, 3, 2, 2, 2), (3,), at=2),
    # --- pools and resampling ---
    case("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), LINE, at=2),
    case("max_pool2d by names", lambda x: F.max_pool2d(x, kernel_size=2, dilation=2), IMAGE, at=2),
    case("max_pool with places", lambda x: F.max_pool2d(x, 2, return_indices=True), IMAGE, at=2),
    case("max_unpool", lambda x, i: F.max_unpool2d(x, i, 2), (2, 4, 8, 4), lambda: torch.arange(256).view(2, 4, 8, 4) * 2 % 128, at=2),
    case("max_pool3d", lambda x: F.max_pool3d(x, 2), VOLUME, at=2),
    case("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 1, 1), LINE, at=2),
    case("avg_pool2d by ceiling", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), IMAGE, at=2),
    case("avg_pool2d by ceiling that fits", lambda x: F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False), (2, 4, 8, 6), at=2),
    case("avg_pool2d without the padding", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE, at=2),
    case("avg_pool2d by ceiling without the padding", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 4, 13, 8), at=2),
    case("avg_pool2d with a divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3), IMAGE, at=2),
    case("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 1, 1), VOLUME, at=2),
    case("lp_pool", lambda x: F.lp_pool2d(x, 2, 2), IMAGE, at=2),
    case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 5), LINE, at=2),
    case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (5, 3)), IMAGE, at=2),
    case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (5, 3)), IMAGE, at=2),
    case("nearest to a size", lambda x: F.interpolate(x, size=(7, 15)), IMAGE, at=2),
    case("nearest-exact", lambda x: F.interpolate(x, size=(17, 9), mode="nearest-exact"), IMAGE, at=2),
    case("bilinear upsampling", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE, at=2),
    case("bilinear to as many", lambda x: F.interpolate(x, scale_factor=1.05, mode="bilinear"), (2, 4, 9, 5), at=2, refused="as long as"),
    case("antialiased", lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True), IMAGE, at=2),
    case("bicubic with corners", lambda x: F.interpolate(x, size=(7, 9), mode="bicubic", align_corners=True), IMAGE, at=2),
    case("area", lambda x: F.interpolate(x, size=(5, 4), mode="area"), IMAGE, at=2),
    case("linear upsampling", lambda x: F.interpolate(x, scale_factor=3.0, mode="linear"), LINE, at=2),
    case("trilinear", lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"), VOLUME, at=2),
    case("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), IMAGE, (2, 5, 6, 2), at=2),
    case("grid_sample at split places", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), IMAGE, (2, 9, 6, 2), at={1: 1}),
    case("pad with a value", lambda x: F.pad(x, (0, 0, 1, 0), value=2.5), IMAGE, at=2),
    case("crop", lambda x: F.pad(x, (-1, 1, -2, 1)), IMAGE, at=2),
    case("pad reflect", lambda x: F.pad(x, (1, 2, 5, 4), mode="reflect"), IMAGE, at=2),
    # --- norms ---
    case("layer_norm over it", lambda x, w, b: F.layer_norm(x, (9, 6), w, b), X, (9, 6), (9, 6)),
    case("layer_norm of split features", lambda x, w: F.layer_norm(x, (9,), w), (2, 5, 9), (9,), at={0: 2, 1: 0}),
    case("rms_norm over it", lambda x, w: F.rms_norm(x, (9, 6), w, eps=0.1), X, (9, 6)),
    case("rms_norm in 16 bits", lambda x: F.rms_norm((x / 100).bfloat16(), (9, 6)).detach().double(), X, tolerance=2e-2),
    case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, (4,), (4,), at=2),
    case("group_norm of channels split inside groups", lambda x, w, b: F.group_norm(x, 2, w, b), (2, 8, 3), (8,), (8,)),
    case("batch_norm of split samples", lambda x: F.batch_norm(x, None, None, training=True), (9, 4), at=0),
    case("batch_norm in evaluation", lambda x, m: F.batch_norm(x, m.detach(), m.detach().abs() + 1), IMAGE, (4,), at=2),
    case("running statistics", lambda x: _running(x), IMAGE, at=2),
    case("instance_norm with running statistics", lambda x: F.instance_norm(x, torch.zeros(4).double(), torch.ones(4).double()), IMAGE, at=2, refused="running statistics"),
    case("local_response_norm", lambda x: F.local_response_norm(x, 3), IMAGE, at=2),
    # --- losses ---
    case("mse_loss", F.mse_loss, X, X, at={0: 1, 1: 1}),
    case("mse_loss with a whole target", F.mse_loss, X, X),
    case("mse_loss with weights", lambda x, y, w: F.mse_loss(x, y, weight=w.abs()), X, X, X, at={0: 1, 1: 1, 2: 1}),
    case("l1_loss summed", lambda x, y: F.l1_loss(x, y, reduction="sum"), X, X, at={0: 1, 1: 1}),
    case("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5) + F.huber_loss(x, y, delta=0.7), X, X),
    case("binary cross-entropy", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=torch.full((6,), 2.0).double()), X, X, at={0: 1, 1: 1}),
    case("binary cross-entropy of probabilities", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="sum"), X, X),
    case("kl_div", lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), X, X, at={0: 1, 1: 1}),
    case("gaussian_nll_loss", lambda x, y: F.gaussian_nll_loss(x, y, y.exp()), X, X, at={0: 1, 1: 1}),
    case("poisson_nll_loss", lambda x, y: F.poisson_nll_loss(x, y.abs()), X, X),
    case("soft_margin_loss", lambda x, y: F.soft_margin_loss(x, y.detach().sign()), X, X),
    case("cross_entropy with ignored", lambda x, t: F.cross_entropy(x.mT, t - 1, ignore_index=-1), X, ints(7, 2, 9), at={0: 1, 1: 1}),
    case("cross_entropy with weights", lambda x, t, w: F.cross_entropy(x.mT, t, w.detach().abs(), label_smoothing=0.1), X, ints(6, 2, 9), (6,), at={0: 1, 1: 1}),
    case("cross_entropy of probabilities", lambda x, p: F.cross_entropy(x.mT, p.softmax(-1).mT, label_smoothing=0.1), X, X, at={0: 1, 1: 1}),
    case("cross_entropy of split classes with ignored", lambda x, t: F.cross_entropy(x, t, ignore_index=3), (7, 9), ints(9, 7), at=1),
    case("cross_entropy with what is no class ignored", lambda x, t, w: F.cross_entropy(x, t.where(t > 0, 255), w.detach().abs(), ignore_index=255), (7, 9), ints(9, 7), (9,)),
    case("cross_entropy of split rows with what is no class ignored", lambda x, t, w: F.cross_entropy(x, t.where(t > 0, 255), w.detach().abs(), ignore_index=255), (7, 9), ints(9, 7), (9,), at=0),
    case("mse_loss in 16 bits", lambda x: F.mse_loss((x.abs() * 30 + 30).half(), x.half() * 0).detach().double(), (40, 9), tolerance=2e-3),
    case("cross_entropy of one row", lambda x, t: F.cross_entropy(x, t), (9,), lambda: torch.tensor(3), at=0),
    case("nll_loss", lambda x, t: F.nll_loss(x.log_softmax(-1).mT, t, reduction="sum"), X, ints(6, 2, 9), at={0: 1, 1: 1}),
    case("multi_margin_loss", lambda x, t: F.multi_margin_loss(x, t), (9, 6), ints(6, 9), at={0: 0, 1: 0}),
    case("margin_ranking_loss", lambda x, y: F.margin_ranking_loss(x, y, (x - y).detach().sign(), 0.1), (9,), (9,), at={0: 0, 1: 0}),
    case("triplet_margin_loss", lambda x, y, z: F.triplet_margin_loss(x, y, z), (9, 6), (9, 6), (9, 6), at={0: 0, 1: 0, 2: 0}),
    case("cosine_embedding_loss", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(9)), (9, 6), (9, 6), at={0: 0, 1: 0}),
    case("ctc_loss", lambda x: F.ctc_loss(x.log_softmax(-1), torch.ones(2, 3).long(), torch.tensor([9, 9]), torch.tensor([3, 2])), (9, 2, 6), at=0, refused="ctc_loss"),
    # --- layers ---
    case("LSTM", lambda x: nn.LSTM(6, 6, dtype=torch.float64, batch_first=True)(x), X, refused="lstm"),
    case("GRU", lambda x: nn.GRU(6, 6, dtype=torch.float64)(x), (9, 2, 6), at=0, refused="gru"),
    case("RNN", lambda x: nn.RNN(6, 6, dtype=torch.float64)(x), (9, 2, 6), at=0, refused="rnn"),
    case("LSTMCell", lambda x: nn.LSTMCell(6, 6, dtype=torch.float64)(x.flatten(0, 1)), X, refused="lstm_cell"),
]  # fmt: skip


def _conv(x, w, mode):
    conv = nn.Conv2d(4, 3, 3, padding=1, padding_mode=mode, bias=False, dtype=torch.float64)
    return torch.func.functional_call(conv, {"weight": w}, (x,))


def _running(x):
    norm = nn.BatchNorm2d(4, dtype=torch.float64)
    return norm(x), norm.running_mean, norm.running_var


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
