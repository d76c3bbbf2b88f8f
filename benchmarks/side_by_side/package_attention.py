"""Attention of the `local-attention` package in the place of the reference model's, which computes the same."""

from local_attention import LocalAttention
from torch import Tensor, nn

from lightning_amp.models.decoders.stratified import StratifiedDecoder


class PackageAttention(nn.Module):
    """Attention with the settings of HiGLUE.

    Args:
        dim: D.
        window: Anchors in a bucket.
    """

    def __init__(self, dim: int, window: int) -> None:
        super().__init__()
        self.inner = LocalAttention(
            dim=dim,
            window_size=window,
            causal=False,
            autopad=True,
            shared_qk=True,
            exact_windowsize=False,
            look_backward=1,
            look_forward=1,
            use_rotary_pos_emb=True,
        )

    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        """[N, D]."""
        rows: Tensor = self.inner(q[None], k[None], values[None])[0]
        return rows


def use_package(decoder: StratifiedDecoder) -> None:
    """Let every stratum attend with the package."""
    for stratum in decoder.strata:
        if stratum.key is not None:
            stratum.key.attention = PackageAttention(decoder.dim, decoder.window)
