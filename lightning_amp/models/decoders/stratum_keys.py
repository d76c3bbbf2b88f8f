"""Compute the key of one stratum, with attention: from the anchor latent v [N, D] to what cells are multiplied with.

    attention, "higlue"   key = val + Attention(qk, qk, p);  key = key + GEGLU(LayerNorm(key) W_ff^T)
    attention, "paper"    key = val + Attention(qk, qk, val);  key = GEGLU(key W_ff^T)
                          with p = LayerNorm(v), qk = p W_qk^T, val = p W_val^T, and Attention local or full
    convolution           key = LeakyReLU(Conv1d(v)), depthwise, kernel 2, anchor i meets anchor i + k

No Linear of a key has a bias. Key modules return the key and the latent that a chained decoder hands on.

Local attention computes what the `local-attention` package does with autopad, shared_qk, rotary and one bucket each
way:

    scores = R(q D^-0.5) R(k / |k|)^T      out = softmax(mask(scores)) values

over the 3w keys of buckets j-1, j, j+1. The rows that fill the last bucket are zeros and *are* attended, with
score 0; keys before the first and after the last bucket are not. An anchor meets itself with score -5e4.

Full attention, softmax(q k^T D^-0.5) values, has one head and masks nothing. It is computed in torch's fused kernels; a
device without one, which would make scores [N, N], is refused.

Legend: N anchors, D dim, w window, W = ceil(N / w) buckets.
"""

from collections.abc import Callable
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_amp._torch import attend_on_cpu
from lightning_amp.errors import ModelError
from lightning_amp.shapes import PerAnchor
from lightning_amp.techniques.hic.attention.sizes import LEAST_NORM, ROTARY_BASE, SELF_SCORE, check_rows, check_sizes

Total = Callable[[Tensor], Tensor]


class LocalAttention(nn.Module):
    """Bucketed local attention: `prepare` once, then `attend` to any run of buckets, in any order.

    Args:
        dim: channels D, even because rotary mixes channel i with channel i + D/2.
        window: anchors per bucket, w.

    Raises:
        ModelError: dim is no even number of 2 or more, or window none of 1 or more.
    """

    reach = "local"

    def __init__(self, dim: int, window: int):
        super().__init__()
        check_sizes("LocalAttention", dim, window)
        self.dim = dim
        self.window = window
        self._pairs = slice(0, dim // 2)
        self._total: Total | None = None

    def extra_repr(self) -> str:
        """Settings shown by `repr`."""
        return f"dim={self.dim}, window={self.window}"

    def shard(self, pairs: slice, total: Total) -> "LocalAttention":
        """The same attention for some of the channels, where others are held elsewhere.

        Args:
            pairs: the channels are i and i + D/2 for these i, in this order: rotary mixes just these two.
            total: sums a tensor over all holders of channels, forward and backward; called once in `prepare` with
                [N, 1] (squared norms of keys) and once in `attend` with the scores.
        """
        shard = LocalAttention(self.dim, self.window)
        shard._pairs, shard._total = pairs, total
        return shard

    def n_buckets(self, n: int) -> int:
        """Number of buckets W that hold n anchors."""
        return -(-n // self.window)

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> tuple[Tensor, ...]:
        """Whole-sequence tensors that `attend` slices.

        Returns:
            Scaled queries, normalised keys, values, each [W w, D]; cosines and sines, [2, 3w, D/2]; of a shard the
            same with its own channels.

        Raises:
            ModelError: Not as many keys and values as queries.
        """
        check_rows(q, k, values)
        if self._total is None:
            normalised = F.normalize(k, dim=-1)
        else:
            # clamped before the root: the root's slope at 0 is infinite
            squared = self._total(k.square().sum(dim=-1, keepdim=True))
            normalised = k / squared.clamp_min(LEAST_NORM**2).sqrt()
        fill = (0, 0, 0, self.n_buckets(len(q)) * self.window - len(q))
        queries, keys = F.pad(q * self.dim**-0.5, fill), F.pad(normalised, fill)
        return queries, keys, F.pad(values, fill), self._rotation(q)

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row dim"]:
        """Output rows of the buckets [first, last), (last - first) w of them."""
        queries, keys, values, rotation = state
        w = self.window
        q = _rotate(queries[first * w : last * w].reshape(last - first, w, -1), rotation[:, 2 * w :])
        k = _rotate(self._around(keys, first, last), rotation)
        scores = q @ k.transpose(1, 2)
        if self._total is not None:
            scores = self._total(scores)
        scores = self._mask(scores, first=first, n_buckets=len(queries) // w)
        return (scores.softmax(-1) @ self._around(values, first, last)).flatten(0, 1)

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Attention over all buckets at once."""
        return self.attend(self.prepare(q, k, values), 0, self.n_buckets(len(q)))[: len(q)]

    def _around(self, rows: Tensor, first: int, last: int) -> Tensor:
        """The 3w rows around each bucket of [first, last), as [bucket, 3w, D]; zeros outside the sequence."""
        w = self.window
        before, after = max(first - 1, 0) * w, min((last + 1) * w, len(rows))
        # whole buckets of zeros where a bucket has no neighbour, which the mask leaves out
        missing = (0, 0, w * (first == 0), (last + 1) * w - after)
        # windows of three buckets that begin a bucket apart, as [bucket, D, 3w]
        return F.pad(rows[before:after], missing).unfold(0, 3 * w, w).transpose(1, 2)

    def _mask(self, scores: Tensor, *, first: int, n_buckets: int) -> Tensor:
        w = self.window
        # a bucket's own rows are the middle third of its 3w keys
        itself = torch.eye(w, 3 * w, dtype=torch.bool, device=scores.device).roll(w, 1)
        bucket = torch.arange(first, first + len(scores), device=scores.device)[:, None]
        neighbour = torch.arange(3 * w, device=scores.device) // w + bucket - 1
        outside = ((neighbour < 0) | (neighbour >= n_buckets))[:, None]
        # In place: the product's backward does not read its result, and a copy would be the largest tensor.
        return scores.masked_fill_(itself, SELF_SCORE).masked_fill_(outside, torch.finfo(scores.dtype).min)

    def _rotation(self, like: Tensor) -> Tensor:
        # trained weights depend on two habits of the package: frequencies are rounded to float32 whatever the dtype,
        # and queries take the last w of the 3w positions
        at_least_float32 = torch.promote_types(like.dtype, torch.float32)
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32, device=like.device) / self.dim
        frequency = (1.0 / ROTARY_BASE**exponent)[self._pairs].to(at_least_float32)
        position = torch.arange(3 * self.window, dtype=at_least_float32, device=like.device)
        angle = position[:, None] * frequency
        return torch.stack((angle.cos(), angle.sin())).to(like.dtype)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation
    # channel i turns with channel i + D/2, as in the package
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""All but the one that makes the scores."""


class FullAttention(nn.Module):
    """Attention to all anchors at once; see `LocalAttention` for that to neighbours."""

    reach = "full"

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Attention of all rows to all rows."""
        check_rows(q, k, values)
        # the kernels read a row's channels side by side
        q, k, values = (x[None, None] if x.stride(-1) == 1 else x.contiguous()[None, None] for x in (q, k, values))
        if q.device.type == "meta":
            # without values torch would choose the form with scores
            return attend_on_cpu(q, k, values)[0][0, 0]  # type: ignore[no-any-return]
        try:
            with sdpa_kernel(KERNELS):
                return F.scaled_dot_product_attention(q, k, values)[0, 0]
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise ModelError(
                f"full attention was called with {q.shape[-1]!r} channels of {q.dtype!r} on {q.device.type!r}, for"
                " which torch has no fused kernel, and its other form makes all scores; use float32 or bfloat16 and a"
                " dim that is a multiple of 8, or key='attention', which is local"
            ) from error


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
        # the kernel reads rows i and i + k: with k more rows at the end there are as many keys as anchors
        padded = F.pad(v, (0, 0, 0, self.stratum))
        key = self.pairs(padded.T[None])[0].T
        return self.activation(key), v
