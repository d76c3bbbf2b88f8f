"""Keys of a stratum made of a foreign decoder's layers: those of stratum_keys.py in every mixture that copies have.

    attention      p = prenorm(v), qk = p W_qk^T, val = p W_val^T
                   key = val + LocalAttention(qk, qk, p or val)
                   key = [key +] GEGLU(postnorm(key) or key W_ff^T)
    convolution    key = activation(Conv1d(v padded)), anchor i meets anchor i + k (padded at the end), or the kernel is
                   centred (the layer pads by itself)

The layers are the foreign decoder's own, with their hooks and parameters; local attention is computed by ours.
Legend: anchor (N), dim (D).
"""

from typing import cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

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
        """The projected anchors alone."""
        return cast(Tensor, self.value(self.prenorm(v)))


class AdaptedConvolutionKey(nn.Module):
    """Key by a depthwise convolution over the anchors.

    Args:
        pairs: The convolution, of kernel 2.
        activation: What follows it.
        padding: Zeros behind the last anchor; 0 where the layer pads by itself.
    """

    def __init__(self, pairs: nn.Module, activation: nn.Module, *, padding: int) -> None:
        super().__init__()
        self.pairs = pairs
        self.activation = activation
        self.padding = padding

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"padding={self.padding}"

    def forward(
        self, v: Float[Tensor, "anchor dim"]
    ) -> tuple[Float[Tensor, "anchor dim"], Float[Tensor, "anchor dim"]]:
        """Key, and v unchanged."""
        padded = F.pad(v, (0, 0, 0, self.padding))
        return self.activation(self.pairs(padded.T[None])[0].T), v
