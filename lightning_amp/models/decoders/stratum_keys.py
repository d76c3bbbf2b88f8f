"""Key of one stratum: from the anchor latent v [N, D] to the matrix that cells are multiplied with.

    attention, "higlue"   key = val + Attention(qk, qk, p);  key = key + GEGLU(LayerNorm(key) W_ff^T)
    attention, "paper"    key = val + Attention(qk, qk, val);  key = GEGLU(key W_ff^T)
                          with p = LayerNorm(v), qk = p W_qk^T, val = p W_val^T, and Attention local or full
    convolution           key = LeakyReLU(Conv1d(v)), depthwise, kernel 2, anchor i meets anchor i + k

No Linear of a key has a bias. Key modules return the key and the latent that a chained decoder hands on.
"""

from typing import Literal, cast, get_args

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.local_attention import FullAttention, LocalAttention
from lightning_amp.shapes import PerAnchor

Variant = Literal["higlue", "paper"]
LEAK = 0.2


def geglu(h: Float[Tensor, "anchor two_dim"]) -> PerAnchor:
    """First half of the channels, gated by the GELU of the second half."""
    a, gate = h.chunk(2, dim=-1)
    return a * F.gelu(gate)


class AttentionKey(nn.Module):
    """Key by attention and a gated feed-forward layer.

    Args:
        window: anchors per bucket of local attention; None for attention to all anchors.
        variant: "higlue" (values are the normalised anchors; residual, post-normalised feed-forward) or
            "paper" (values are the projected anchors; plain feed-forward, so `postnorm` has no parameters).

    Raises:
        ModelError: unknown variant.
    """

    def __init__(self, dim: int, window: int | None, *, variant: Variant = "higlue"):
        super().__init__()
        if variant not in get_args(Variant):
            raise ModelError(f"AttentionKey(variant={variant!r}): choose one of {get_args(Variant)!r}")
        # values are the normalised anchors, or the projected ones
        self.projected, self.residual = variant == "paper", variant == "higlue"
        self.prenorm = nn.LayerNorm(dim)
        self.qk = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        # a random rotation would hide from the cells that a stratum's anchors are those the genes are linked to
        nn.init.eye_(self.value.weight)
        self.attention = FullAttention() if window is None else LocalAttention(dim, window)
        self.postnorm = nn.LayerNorm(dim) if variant == "higlue" else nn.Identity()
        self.ff = nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, v: PerAnchor) -> tuple[PerAnchor, PerAnchor]:
        """Key, and the projected anchors (the next anchor latent of a chained decoder)."""
        p = self.prenorm(v)
        qk, val = self.qk(p), self.value(p)
        key = val + self.attention(qk, qk, val if self.projected else p)
        gated = geglu(self.ff(self.postnorm(key)))
        return (key + gated if self.residual else gated), val

    def spine(self, v: PerAnchor) -> PerAnchor:
        """Only the projected anchors: what a chained decoder hands on."""
        return cast(Tensor, self.value(self.prenorm(v)))


class ConvolutionKey(nn.Module):
    """Key in which anchor i meets anchor i + stratum, by a depthwise convolution padded at the end."""

    def __init__(self, dim: int, stratum: int):
        super().__init__()
        if stratum < 1:
            raise ModelError(
                f"ConvolutionKey(stratum={stratum!r}): a pair needs a distance; stratum 0 has no key module, "
                "choose stratum >= 1"
            )
        self.stratum = stratum
        self.pairs = nn.Conv1d(dim, dim, 2, dilation=stratum, groups=dim)
        self.activation = nn.LeakyReLU(LEAK)

    def forward(self, v: PerAnchor) -> tuple[PerAnchor, PerAnchor]:
        """Key, and v unchanged: a convolution has no chained form."""
        padded = F.pad(v, (0, 0, 0, self.stratum))
        key = self.pairs(padded.T[None])[0].T
        return self.activation(key), v
