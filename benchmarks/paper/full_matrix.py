"""Attention as the paper's ablation without S3 has it: one masked N x N matrix of scores.

    out = softmax(mask(q k^T)) values,     [N, N]

The reference model's attention never makes such a matrix, even without S3: its buckets are cut first. This one is
registered as S9 to see what it asks for. It has the same result only where every bucket sees every key, so it is for
counting bytes and refuses real tensors.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import lightning_amp
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.techniques.table import STRATEGIES


@dataclass(frozen=True)
class FullMatrix:
    """One matrix of all scores."""


class FullMatrixAttention(nn.Module):
    """Attention through one [N, N] matrix; `inner` makes queries, keys and values."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        """[N, D], without values."""
        assert q.is_meta, "for counting bytes only: the mask is left out"
        queries, keys, values, *_ = self.inner.prepare(q, k, values)
        rows: Tensor = ((queries @ keys.T).softmax(-1) @ values)[: len(q)]
        return rows


def targets(shape: ModelShape) -> list[tuple[str, FullMatrix]]:
    """Every attention of the decoder."""
    assert shape.decoder is not None, "for a decomposed decoder"
    return [(f"{shape.decoder.fqn}.strata.*.key.attention", FullMatrix())]


def register() -> None:
    """Let plans ask for it as S9; importing this file does not, for a process may have other uses of the library."""
    if "S9" not in STRATEGIES:
        lightning_amp.register_technique(
            "S9",
            title="full score matrix",
            shrinks="nothing: makes [N, N]",
            spec=FullMatrix,
            targets=targets,
            install=lambda module, spec, mesh: FullMatrixAttention(module),
        )
