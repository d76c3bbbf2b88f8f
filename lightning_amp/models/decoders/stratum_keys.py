"""Compute the key of one stratum, with which cells are multiplied, from the anchor latents v [N, D].

    attention, "higlue"   key = val + Attention(qk, qk, p);  key = key + GEGLU(LayerNorm(key) W_ff^T)
    attention, "paper"    key = val + Attention(qk, qk, val);  key = GEGLU(key W_ff^T)
                          with p = LayerNorm(v), qk = p W_qk^T, val = p W_val^T, and Attention local or full
    convolution           key = LeakyReLU(Conv1d(v)), depthwise, of anchors i and i + k (kernel 2, dilation k)

Linear layers of a key have no bias. Key modules return the key, and the latent for the next stratum if chained.

Local attention computes what the `local-attention` package does with autopad, shared_qk, rotary and one bucket each
way:

    scores = R(q D^-0.5) R(k / |k|)^T      out = softmax(mask(scores)) values

over the 3w keys of buckets j-1, j, j+1. The rows that pad the last bucket are zeros and *are* attended, with
score 0; keys before the first and after the last bucket are masked. The score of an anchor with itself is -5e4.

Full attention, softmax(q k^T D^-0.5) values, has one head and no mask. It runs in torch's fused kernels; a device
without one, which would compute scores [N, N], raises an error.

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
        ModelError: dim is not even or less than 2, or window is less than 1.
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
        """Return the same attention for a shard of the channels.

        Args:
            pairs: indices i; the shard has channels i and i + D/2, in this order, because rotary mixes these two.
            total: all-reduce over the ranks, forward and backward; called once in `prepare` with
                [N, 1] (squared norms of keys) and once in `attend` with the scores.
        """
        shard = LocalAttention(self.dim, self.window)
        shard._pairs, shard._total = pairs, total
        return shard

    def n_buckets(self, n: int) -> int:
        """Return the number of buckets W for n anchors."""
        return -(-n // self.window)

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> tuple[Tensor, ...]:
        """Return the tensors of the full sequence that `attend` slices.

        Returns:
            Scaled queries, normalised keys, values, each [W w, D]; cosines and sines, [2, 3w, D/2]; a shard has its
            own channels only.

        Raises:
            ModelError: The numbers of queries, keys and values differ.
        """
        check_rows(q, k, values)
        if self._total is None:
            normalised = F.normalize(k, dim=-1)
        else:
            # clamped before the root: its gradient at 0 is infinite
            squared = self._total(k.square().sum(dim=-1, keepdim=True))
            normalised = k / squared.clamp_min(LEAST_NORM**2).sqrt()
        fill = (0, 0, 0, self.n_buckets(len(q)) * self.window - len(q))
        queries, keys = F.pad(q * self.dim**-0.5, fill), F.pad(normalised, fill)
        return queries, keys, F.pad(values, fill), self._rotation(q)

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row dim"]:
        """Return the (last - first) w output rows of the buckets [first, last)."""
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
        """Attend to all buckets at once."""
        return self.attend(self.prepare(q, k, values), 0, self.n_buckets(len(q)))[: len(q)]

    def _around(self, rows: Tensor, first: int, last: int) -> Tensor:
        """Return the 3w rows around each bucket of [first, last), [bucket, 3w, D]; zeros outside the sequence."""
        w = self.window
        before, after = max(first - 1, 0) * w, min((last + 1) * w, len(rows))
        # buckets of zeros for missing neighbours, which the mask excludes
        missing = (0, 0, w * (first == 0), (last + 1) * w - after)
        # overlapping windows of three buckets, [bucket, D, 3w]
        return F.pad(rows[before:after], missing).unfold(0, 3 * w, w).transpose(1, 2)

    def _mask(self, scores: Tensor, *, first: int, n_buckets: int) -> Tensor:
        w = self.window
        # the middle third of the 3w keys are the bucket's own rows
        itself = torch.eye(w, 3 * w, dtype=torch.bool, device=scores.device).roll(w, 1)
        bucket = torch.arange(first, first + len(scores), device=scores.device)[:, None]
        neighbour = torch.arange(3 * w, device=scores.device) // w + bucket - 1
        outside = ((neighbour < 0) | (neighbour >= n_buckets))[:, None]
        # in place: the product's backward pass does not read its result, and a copy would be the largest tensor
        return scores.masked_fill_(itself, SELF_SCORE).masked_fill_(outside, torch.finfo(scores.dtype).min)

    def _rotation(self, like: Tensor) -> Tensor:
        # trained weights depend on two details of the package: frequencies are rounded to float32 for any dtype, and
        # queries have the last w of the 3w positions
        at_least_float32 = torch.promote_types(like.dtype, torch.float32)
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32, device=like.device) / self.dim
        frequency = (1.0 / ROTARY_BASE**exponent)[self._pairs].to(at_least_float32)
        position = torch.arange(3 * self.window, dtype=at_least_float32, device=like.device)
        angle = position[:, None] * frequency
        return torch.stack((angle.cos(), angle.sin())).to(like.dtype)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation
    # rotates channels i and i + D/2, as in the package
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""All backends except the one that computes the scores."""


class FullAttention(nn.Module):
    """Attention to all anchors; `LocalAttention` attends to neighbouring buckets."""

    reach = "full"

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Attend from all rows to all rows."""
        check_rows(q, k, values)
        # the kernels require contiguous channels
        q, k, values = (x[None, None] if x.stride(-1) == 1 else x.contiguous()[None, None] for x in (q, k, values))
        if q.device.type == "meta":
            # for meta tensors, torch would choose the backend with scores
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
    """Return the first half of the channels times the GELU of the second half."""
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
        # identity: after a random rotation, the cells could not match a stratum's anchors with those linked to genes
        nn.init.eye_(self.value.weight)
        self.attention = FullAttention() if window is None else LocalAttention(dim, window)
        self.postnorm = nn.LayerNorm(dim) if variant == "higlue" else nn.Identity()
        self.ff = nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, v: PerAnchor) -> tuple[PerAnchor, PerAnchor]:
        """Return the key, and the projected anchors (v of the next stratum of a chained decoder)."""
        p = self.prenorm(v)
        qk, val = self.qk(p), self.value(p)
        key = val + self.attention(qk, qk, val if self.projected else p)
        gated = geglu(self.ff(self.postnorm(key)))
        return (key + gated if self.residual else gated), val

    def spine(self, v: PerAnchor) -> PerAnchor:
        """Return only the projected anchors, v of the next stratum of a chained decoder."""
        return cast(Tensor, self.value(self.prenorm(v)))


class ConvolutionKey(nn.Module):
    """Key that combines anchors i and i + stratum, by a depthwise convolution padded at the end."""

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
        """Return the key, and v unchanged: a convolution has no chained form."""
        # the kernel reads rows i and i + k: k rows of padding give one key per anchor
        padded = F.pad(v, (0, 0, 0, self.stratum))
        key = self.pairs(padded.T[None])[0].T
        return self.activation(key), v
