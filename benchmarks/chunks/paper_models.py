"""Define the models of AutoChunk's evaluation as they are built: a block of the Evoformer, a U-Net of latent diffusion.

Attention is written out, or with `fused` in one kernel. GPT and ViT are those of `models.py`. `size` is "paper" or
"small", of which the first runs on fake tensors only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.chunks.models import GPT, Fused, Layer, ViT

ROWS = 64
"""Of a piece of the expert's."""


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, fused: bool) -> Tensor:
    """Mixed values [..., head, position, width]."""
    if fused and q.dim() > 4:  # kernels take one dim of samples
        rows = attend(*(t.flatten(0, 1) for t in (q, k, v)), bias if bias is None else bias[0], fused=True)
        return rows.unflatten(0, q.shape[:2])
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores if bias is None else scores + bias, dim=-1) @ v


def in_pieces(layer: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """What an expert writes: a layer on so many rows of dim 1 at a time; 0 for all at once."""
    return torch.cat([layer(part) for part in x.split(rows, dim=1)], dim=1) if rows else layer(x)


class GatedAttention(nn.Module):
    """Along the rows of a table [1, row, position, dim], with a gate; `pair` gives a bias."""

    def __init__(self, dim: int, heads: int, width: int, pair_dim: int = 0, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused, inner = heads, fused, heads * width
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(dim, inner), nn.Linear(inner, dim)
        if pair_dim:
            self.pair_norm, self.bias = nn.LayerNorm(pair_dim), nn.Linear(pair_dim, heads, bias=False)

    def forward(self, x: Tensor, pair: Tensor | None = None, rows: int = 0) -> Tensor:
        bias = None
        if pair is not None:
            bias = self.bias(self.pair_norm(pair)).permute(0, 3, 1, 2).unsqueeze(1)
        return in_pieces(partial(self._rows, bias), self.norm(x), rows)

    def _rows(self, bias: Tensor | None, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(2, 3) for p in (self.q, self.k, self.v))
        mixed = attend(q, k, v, bias, fused=self.fused).transpose(2, 3).flatten(3)
        return self.out(torch.sigmoid(self.gate(x)) * mixed)


class OuterProductMean(nn.Module):
    """From the alignment [1, sequence, position, dim] to pairs."""

    def __init__(self, dim: int, pair_dim: int, width: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(dim), nn.Linear(dim, width), nn.Linear(dim, width)
        self.out = nn.Linear(width * width, pair_dim)

    def forward(self, msa: Tensor, rows: int = 0) -> Tensor:
        x = self.norm(msa)
        return in_pieces(partial(self._rows, self.b(x)), self.a(x).transpose(1, 2), rows)

    def _rows(self, b: Tensor, a: Tensor) -> Tensor:
        product = torch.einsum("xisc,xsjd->xijcd", a, b) / b.shape[1]
        return self.out(product.flatten(3))


class TriangleMultiplication(nn.Module):
    """With gates; outgoing edges (i, k), (j, k), or incoming ones."""

    def __init__(self, dim: int, *, outgoing: bool) -> None:
        super().__init__()
        self.equation = "xikc,xjkc->xijc" if outgoing else "xkic,xkjc->xijc"
        self.norm, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.a, self.b, self.gate_a, self.gate_b, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(6))

    def forward(self, pair: Tensor) -> Tensor:
        x = self.norm(pair)
        a, b = torch.sigmoid(self.gate_a(x)) * self.a(x), torch.sigmoid(self.gate_b(x)) * self.b(x)
        return torch.sigmoid(self.gate(x)) * self.out(self.norm_out(torch.einsum(self.equation, a, b)))


def transition(dim: int) -> nn.Sequential:
    """A feed-forward four times as wide."""
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))


class Evoformer(nn.Module):
    """One block of AlphaFold 2: (alignment [1, sequence, position, dim], pairs [1, i, j, dim]) -> the same.

    Args:
        dim, pair_dim: Of the two.
        heads, pair_heads: Of the attention in both.
        width: Of a head.
        rows: That the expert's layers run at a time; 0 for all.
    """

    def __init__(
        self, dim: int, pair_dim: int, heads: int, pair_heads: int, width: int, *, fused: bool, rows: int = 0
    ) -> None:
        super().__init__()
        self.rows = rows
        self.along_rows = GatedAttention(dim, heads, width, pair_dim, fused=fused)
        self.along_columns = GatedAttention(dim, heads, width, fused=fused)
        self.outer, self.msa_wide = OuterProductMean(dim, pair_dim, width), transition(dim)
        self.outgoing, self.incoming = (TriangleMultiplication(pair_dim, outgoing=o) for o in (True, False))
        self.starting, self.ending = (
            GatedAttention(pair_dim, pair_heads, width, pair_dim, fused=fused) for _ in range(2)
        )
        self.pair_wide = transition(pair_dim)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows
        msa = msa + self.along_rows(msa, pair, rows)
        msa = msa + self.along_columns(msa.transpose(1, 2), None, rows).transpose(1, 2)
        msa = msa + in_pieces(self.msa_wide, msa, rows)
        pair = pair + self.outer(msa, rows)
        pair = pair + self.outgoing(pair)
        pair = pair + self.incoming(pair)
        pair = pair + self.starting(pair, pair, rows)
        turned = pair.transpose(1, 2)
        pair = pair + self.ending(turned, turned, rows).transpose(1, 2)
        return msa, pair + in_pieces(self.pair_wide, pair, rows)


class Residual(nn.Module):
    """Two convolutions with group norm, and the time between them."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        inner = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(inner)))


class Attention(nn.Module):
    """Of [image, position, dim] to itself or to a context."""

    def __init__(self, dim: int, heads: int, context: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.k, self.v = nn.Linear(context, dim, bias=False), nn.Linear(context, dim, bias=False)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q(x), self.k(context), self.v(context))
        )
        return self.out(attend(q, k, v, None, fused=self.fused).transpose(1, 2).flatten(2))


class SpatialTransformer(nn.Module):
    """Attention of pixels to each other and to the words, and a gated feed-forward."""

    def __init__(self, dim: int, heads: int, context: int, *, fused: bool) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = (nn.GroupNorm(8, dim), nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.own, self.cross = (Attention(dim, heads, d, fused=fused) for d in (dim, context))
        self.wide, self.narrow = nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        y = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norms[0](y)
        y = y + self.own(normed, normed)
        y = y + self.cross(self.norms[1](y), context)
        value, gate = self.wide(self.norms[2](y)).chunk(2, dim=-1)
        y = y + self.narrow(value * F.gelu(gate))
        return x + self.leave(y.transpose(1, 2).unflatten(2, x.shape[2:]))


class LatentUNet(nn.Module):
    """Two levels, of channels and twice as many, with one residual block and one transformer each on either way."""

    def __init__(self, channels: int, heads: int, context: int, *, fused: bool) -> None:
        super().__init__()
        wide, time = 2 * channels, 4 * channels

        def level(inside: int, outside: int) -> nn.ModuleList:
            return nn.ModuleList(
                [Residual(inside, outside, time), SpatialTransformer(outside, heads, context, fused=fused)]
            )

        self.first, self.last = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.down_1, self.down_2 = level(channels, channels), level(channels, wide)
        self.smaller = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.middle = nn.ModuleList([*level(wide, wide), Residual(wide, wide, time)])
        self.up_2, self.up_1 = level(2 * wide, wide), level(wide + channels, channels)
        self.norm = nn.GroupNorm(8, channels)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        time = self.time(time)

        def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
            for block in blocks:
                x = block(x, time, context)
            return x

        one = run(self.down_1, self.first(x))
        two = run(self.down_2, self.smaller(one))
        x = run(self.up_2, torch.cat([run(self.middle, two), two], dim=1))
        x = run(self.up_1, torch.cat([F.interpolate(x, scale_factor=2.0), one], dim=1))
        return self.last(F.silu(self.norm(x)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A model at two sizes.

    Attributes:
        make: With or without fused attention, at a size.
        args: At a size.
        sizes: In words, by size.
    """

    make: Callable[[bool, str], nn.Module]
    args: Callable[[str], tuple[Tensor, ...]]
    sizes: dict[str, str]


def gpt(fused: bool, size: str) -> nn.Module:
    """Two layers, as large as GPT-2 small's or small."""
    dim, heads = (768, 12) if size == "paper" else (128, 4)
    return GPT(dim, 2, heads=heads, kind=Fused if fused else Layer)


def vit(fused: bool, size: str) -> nn.Module:
    """Two layers, as large as ViT-L's or small."""
    dim, heads, patch = (1024, 16, 16) if size == "paper" else (128, 4, 8)
    found = ViT(dim, 2, patch=patch, heads=heads)
    if fused:
        found.layers = nn.Sequential(*(Fused(dim, heads, causal=False) for _ in range(2)))
    return found


def evoformer(fused: bool, size: str, rows: int = 0) -> nn.Module:
    """One block, as wide as AlphaFold's or small."""
    return Evoformer(*((256, 128, 8, 4, 32) if size == "paper" else (32, 32, 4, 4, 8)), fused=fused, rows=rows)


def unet(fused: bool, size: str) -> nn.Module:
    """Channels of Stable Diffusion's first two levels, or few."""
    return LatentUNet(*((320, 8, 768) if size == "paper" else (24, 4, 40)), fused=fused)


def table_args(size: str, *, sequences: int = 128, side: int = 512) -> tuple[Tensor, ...]:
    """Alignment and pairs."""
    n, r, dim, pair = (sequences, side, 256, 128) if size == "paper" else (16, 96, 32, 32)
    return torch.randn(1, n, r, dim), torch.randn(1, r, r, pair)


def image_args(size: str) -> tuple[Tensor, ...]:
    """Latent image, embedded time and words."""
    side, channels, words, context = (128, 320, 77, 768) if size == "paper" else (32, 24, 16, 40)
    return torch.randn(1, 4, side, side), torch.randn(1, channels), torch.randn(1, words, context)


def text_args(size: str) -> tuple[Tensor, ...]:
    """Words."""
    return (torch.randint(1000, (1, 4096 if size == "paper" else 512)),)


def picture_args(size: str) -> tuple[Tensor, ...]:
    """One image."""
    side = 1024 if size == "paper" else 160
    return (torch.randn(1, 3, side, side),)


KINDS = {
    "GPT": Kind(gpt, text_args, {"paper": "4,096 words, 768 wide", "small": "512 words, 128 wide"}),
    "ViT": Kind(vit, picture_args, {"paper": "side 1,024, 1,024 wide", "small": "side 160, 128 wide"}),
    "Evoformer": Kind(evoformer, table_args, {"paper": "128 x 512, 256 and 128 wide", "small": "16 x 96, 32 wide"}),
    "U-Net": Kind(unet, image_args, {"paper": "side 128, 320 channels", "small": "side 32, 24 channels"}),
}
