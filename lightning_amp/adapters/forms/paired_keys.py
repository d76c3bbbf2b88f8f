"""Keys of one resolution of several: each reads its own rows of v.

    convolution    key = activation(Conv1d(v of the resolution, padded at the end))
    attention      p = prenorm(key), qk = p W_qk^T
                   key = key + LocalAttention(qk, qk, p)
                   key = key + GEGLU(postnorm(key) W_ff^T)         `key` of the convolution is the residual base

The layers are the foreign decoder's own; local attention is computed by ours.
Legend: anchor (N of all resolutions), own_anchor (those of one), dim (D).
"""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.adapters.forms.adapted_keys import AdaptedConvolutionKey
from lightning_amp.models.decoders.stratum_keys import geglu


class RowsConvolutionKey(AdaptedConvolutionKey):
    """Key by a depthwise convolution over the anchors of a resolution.

    Args:
        pairs: The convolution, of kernel 2.
        activation: What follows it.
        padding: Zeros behind the last anchor.
        rows: Of v.
    """

    def __init__(self, pairs: nn.Module, activation: nn.Module, *, padding: int, rows: slice) -> None:
        super().__init__(pairs, activation, padding=padding)
        self.rows = rows

    def forward(
        self, v: Float[Tensor, "anchor dim"]
    ) -> tuple[Float[Tensor, "own_anchor dim"], Float[Tensor, "anchor dim"]]:
        """Key, and v unchanged."""
        return super().forward(v[self.rows])[0], v


class PairedAttentionKey(nn.Module):
    """Key by a convolution, local attention and a gated feed-forward layer.

    Args:
        paired: The convolution.
        layers: Modules prenorm, qk, attention, postnorm and ff.
        checkpointed: Whether the foreign decoder computes its keys again in the backward pass.
    """

    def __init__(
        self, paired: RowsConvolutionKey, layers: dict[str, nn.Module], *, checkpointed: bool
    ) -> None:
        super().__init__()
        self.paired = paired
        self.prenorm, self.qk, self.attention = (layers[name] for name in ("prenorm", "qk", "attention"))
        self.postnorm, self.ff = (layers[name] for name in ("postnorm", "ff"))
        self.checkpointed = checkpointed

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"checkpointed={self.checkpointed}"

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
