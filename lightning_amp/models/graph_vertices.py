"""Leaves of the graph encoder that hold the vertices of a device: all of them by default.

    AllVertices        what needs other vertices than the one at hand: messages, noise, means, ends of edges
    FeatureVertices    rows of v for the decoder of one modality

Noise of all vertices comes from one stream of a generator, some rows at a time: a device that holds a part
draws all of them, keeps its own, and stays in step. That is 16 times as fast as to hash every vertex's key.

Legend: vertex (V), dim (D), edge (E of the symmetrised graph), own_vertex (those that a device holds).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_amp.shapes import PerVertex, Scalar

EDGES_AT_A_TIME = 65_536
ROWS_AT_A_TIME = 65_536
Messages = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Makes source, target and coefficient of all edges."""


class AllVertices(nn.Module):
    """Every vertex is here; a leaf, so that a technique can shard them."""

    def propagate(self, x: PerVertex, messages: Messages) -> PerVertex:
        """Sum over edges of coefficient * x[source] at their targets; no gradient to the coefficients."""
        result: Tensor = _Propagate.apply(x, *messages())  # type: ignore[no-untyped-call]
        return result

    def add_messages(self, out: Tensor, x: Tensor, **edges: Tensor) -> None:
        """Add the messages of some edges to out, without gradients; `edges` as of the function."""
        add_messages(out, x, **edges)

    def blocks(
        self, n_vertices: int, like: Float[Tensor, "row dim"], generator: torch.Generator | None
    ) -> Iterator[tuple[int, Float[Tensor, "block dim"]]]:
        """Standard normal noise of all vertices: the first of some vertices, and theirs."""
        for first in range(0, n_vertices, ROWS_AT_A_TIME):
            size = (min(ROWS_AT_A_TIME, n_vertices - first), like.shape[1])
            yield first, torch.randn(size, dtype=like.dtype, device=like.device, generator=generator)

    def noise(self, like: PerVertex, generator: torch.Generator | None) -> PerVertex:
        """Standard normal noise of the vertices that are here."""
        noise = torch.empty_like(like)
        for first, block in self.blocks(len(like), like, generator):
            noise[first : first + len(block)] = block
        return noise

    def mean(self, values: Float[Tensor, " own_vertex"]) -> Scalar:
        """Mean over all vertices."""
        return values.mean()

    def rows(self, v: PerVertex, *ids: Int[Tensor, "*end"]) -> tuple[Tensor, ...]:
        """Rows of any vertices, by their ids; each [*end, dim]."""
        return tuple(v[i] for i in ids)


class FeatureVertices(nn.Module):
    """The vertices that are features of one modality; a leaf.

    Args:
        ids: vertex of each feature, of Hi-C of each anchor.

    Attributes:
        on_host: the ids in the host's memory, for who shards vertices.
    """

    ids: Tensor

    def __init__(self, ids: Int[Tensor, " feature"]):
        super().__init__()
        self.on_host = ids
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, v: PerVertex) -> Float[Tensor, "feature dim"]:
        """Rows of v that the modality's decoder gets."""
        rows: Tensor = v[self.ids]
        return rows


def add_messages(
    out: Float[Tensor, "target dim"],
    x: Float[Tensor, "source dim"],
    *,
    source: Int[Tensor, " edge"],
    target: Int[Tensor, " edge"],
    coefficient: Float[Tensor, " edge"],
) -> None:
    """Add coefficient * x[source] to out at the targets.

    A few edges at a time: all messages, [E, D], would outweigh the vertices many times over.
    """
    for first in range(0, len(source), EDGES_AT_A_TIME):
        piece = slice(first, first + EDGES_AT_A_TIME)
        out.index_add_(0, target[piece], coefficient[piece, None] * x[source[piece]])


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor, coefficient: Tensor) -> Tensor:
        ctx.save_for_backward(source, target, coefficient)
        out = torch.zeros_like(x)
        add_messages(out, x, source=source, target=target, coefficient=coefficient)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, target, coefficient = ctx.saved_tensors
        out = torch.zeros_like(grad)
        add_messages(out, grad, source=target, target=source, coefficient=coefficient)
        return out, None, None, None
