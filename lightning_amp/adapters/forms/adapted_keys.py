"""Define keys of a stratum that use a foreign decoder's layers, for every supported form (stratum_keys.py).

    attention      p = prenorm(v), qk = p W_qk^T, val = p W_val^T
                   key = val + LocalAttention(qk, qk, p or val)
                   key = [key +] GEGLU(postnorm(key) or key W_ff^T)
    convolution    key = activation(Conv1d(v padded)), anchor i meets anchor i + k (padded at the end), or the kernel is
                   centred (the layer pads by itself); v of one resolution, where there are several
    both           key of the convolution, p = prenorm(key), qk = p W_qk^T
                   key = key + LocalAttention(qk, qk, p)
                   key = key + GEGLU(postnorm(key) W_ff^T)

The layers are the foreign decoder's own, with their hooks and parameters; local attention is computed by ours.
Legend: anchor (N), own_anchor (those of one resolution), dim (D).
"""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.models.decoders.stratum_keys import geglu


class AdaptedAttentionKey(nn.Module):
    """Key by local attention and a gated feed-forward layer.

    Args:
        layers: Modules for all names of protocol.ATTENTION_KEY.
        projected: Attend to `val` instead of p.
        residual: Add the feed-forward layer's result to its input.
    """

    def __init__(self, layers: dict[str, nn.Module], *, projected: bool, residual: bool) -> None:
        super().__init__()
        self.prenorm, self.qk, self.value = (layers[name] for name in ("prenorm", "qk", "value"))
        self.attention, self.postnorm, self.ff = (layers[name] for name in ("attention", "postnorm", "ff"))
        self.projected = projected
        self.residual = residual

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"projected={self.projected}, residual={self.residual}"

    def forward(
        self, v: Float[Tensor, "anchor dim"]
    ) -> tuple[Float[Tensor, "anchor dim"], Float[Tensor, "anchor dim"]]:
        """Key, and the projected anchors (the next anchor latent of a chained decoder)."""
        p = self.prenorm(v)
        qk, val = self.qk(p), self.value(p)
        key = val + self.attention(qk, qk, val if self.projected else p)
        gated = geglu(self.ff(self.postnorm(key)))
        return (key + gated if self.residual else gated), val

    def spine(self, v: Float[Tensor, "anchor dim"]) -> Float[Tensor, "anchor dim"]:
        """Only the projected anchors."""
        return cast(Tensor, self.value(self.prenorm(v)))


class AdaptedConvolutionKey(nn.Module):
    """Key by a depthwise convolution over the anchors.

    Args:
        pairs: The convolution, of kernel 2.
        padding: Zeros behind the last anchor; 0 where the layer pads by itself.
        rows: Of v, which the resolution has.
    """

    def __init__(
        self, pairs: nn.Module, activation: nn.Module, *, padding: int, rows: slice = slice(None)
    ) -> None:
        super().__init__()
        self.pairs = pairs
        self.activation = activation
        self.padding = padding
        self.rows = rows

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"padding={self.padding}"

    def forward(
        self, v: Float[Tensor, "anchor dim"]
    ) -> tuple[Float[Tensor, "own_anchor dim"], Float[Tensor, "anchor dim"]]:
        """Key, and v unchanged."""
        padded = F.pad(v[self.rows], (0, 0, 0, self.padding))
        return self.activation(self.pairs(padded.T[None])[0].T), v


class PairedAttentionKey(nn.Module):
    """Key by a convolution, local attention and a gated feed-forward layer.

    Args:
        layers: Modules prenorm, qk, attention, postnorm and ff.
        checkpointed: Whether the foreign decoder computes its keys again in the backward pass.
    """

    def __init__(
        self, paired: AdaptedConvolutionKey, layers: dict[str, nn.Module], *, checkpointed: bool
    ) -> None:
        super().__init__()
        self.paired = paired
        self.prenorm, self.qk, self.attention = (layers[name] for name in ("prenorm", "qk", "attention"))
        self.postnorm, self.ff = (layers[name] for name in ("postnorm", "ff"))
        self.checkpointed = checkpointed

    def forward(
        self, v: Float[Tensor, "anchor dim"]
    ) -> tuple[Float[Tensor, "own_anchor dim"], Float[Tensor, "anchor dim"]]:
        """Key, and v unchanged."""
        if self.checkpointed and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(self._key, v, use_reentrant=False)), v
        return self._key(v), v

    def _key(self, v: Tensor) -> Tensor:
        key, _ = self.paired(v)
        p = self.prenorm(key)
        qk = self.qk(p)
        key = key + self.attention(qk, qk, p)
        return cast(Tensor, key + geglu(self.ff(self.postnorm(key))))
