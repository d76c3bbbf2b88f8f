"""Vertices of the guidance graph: their latent v, and the likelihood of the graph's edges given v.

    h = A embedding,  A_st = sign w / sqrt(d_s d_t),  d_s = sum of w over the edges of s
    v ~ Normal(h W_loc^T + b, softplus(h W_std^T + b) + 1e-7)
    edge of sign s between i and j: Bernoulli(logit = s <v_i, v_j>)

Positive edges are drawn in proportion to their weight; negative ones keep source and sign and take a target
drawn uniformly (which may happen to be a neighbour). The two kinds are averaged separately.
Legend: vertex (V), dim (D), edge (E of the symmetrised graph).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.models.encoders import LEAST_STD

EDGES_AT_A_TIME = 65_536


class GraphEncoder(nn.Module):
    """Latent of every vertex, and the likelihood of sampled edges.

    Args:
        n_vertices: vertices V.
        dim: channels D of embedding and latent.
        source: one end of each edge.
        target: the other end; each edge is listed in one direction and means both.
        weight: positive weight of each edge.
        sign: +1 or -1.

    Raises:
        ModelError: no edges, or a weight that is not positive.
    """

    source: Tensor
    target: Tensor
    weight: Tensor
    sign: Tensor

    def __init__(
        self,
        n_vertices: int,
        dim: int,
        *,
        source: Int[Tensor, " edge"],
        target: Int[Tensor, " edge"],
        weight: Float[Tensor, " edge"],
        sign: Float[Tensor, " edge"],
    ):
        super().__init__()
        if len(weight) == 0 or not bool((weight > 0).all()):
            raise ModelError(
                f"the guidance graph has {len(weight)!r} edges with weights from "
                f"{min(weight.tolist(), default=None)!r}; it needs at least one edge, and positive weights"
            )
        one_way = source != target
        self.n_vertices = n_vertices
        self.register_buffer("source", torch.cat((source, target[one_way])), persistent=False)
        self.register_buffer("target", torch.cat((target, source[one_way])), persistent=False)
        self.register_buffer("weight", torch.cat((weight, weight[one_way])), persistent=False)
        self.register_buffer("sign", torch.cat((sign, sign[one_way])), persistent=False)
        self.embedding = nn.Parameter(torch.randn(n_vertices, dim) * dim**-0.5)
        self.loc = nn.Linear(dim, dim)
        self.std = nn.Linear(dim, dim)

    def forward(self) -> tuple[Float[Tensor, "vertex dim"], Float[Tensor, "vertex dim"]]:
        """Mean and standard deviation of v."""
        degree = self.weight.new_zeros(self.n_vertices).index_add_(0, self.source, self.weight)
        coefficient = self.sign * self.weight * (degree[self.source] * degree[self.target]).rsqrt()
        h = propagate(self.embedding, self.source, target=self.target, coefficient=coefficient)
        return self.loc(h), F.softplus(self.std(h)) + LEAST_STD

    def nll(
        self,
        v: Float[Tensor, "vertex dim"],
        *,
        n_positive: int,
        negatives: int,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """Negative log-likelihood of sampled edges, half the sum of the positives' and the negatives' means.

        Args:
            v: latent of the vertices.
            n_positive: edges to draw.
            negatives: negative edges for each positive one.
            generator: of the draws; the default one when None.
        """
        cumulative = self.weight.cumsum(0, dtype=torch.float64)
        uniform = torch.rand(n_positive, dtype=torch.float64, device=v.device, generator=generator)
        edge = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp_max(
            len(cumulative) - 1
        )
        size = (n_positive, negatives)
        other = torch.randint(self.n_vertices, size, device=v.device, generator=generator)
        source, sign = v[self.source[edge]], self.sign[edge]
        positive = F.logsigmoid(sign * (source * v[self.target[edge]]).sum(-1))
        negative = F.logsigmoid(-sign[:, None] * (v[other] @ source[:, :, None]).squeeze(-1))
        return -(positive.mean() + negative.mean()) / 2


def propagate(
    x: Float[Tensor, "vertex dim"],
    source: Int[Tensor, " edge"],
    *,
    target: Int[Tensor, " edge"],
    coefficient: Float[Tensor, " edge"],
) -> Float[Tensor, "vertex dim"]:
    """Sum over edges of coefficient * x[source] at their targets; no gradient to the coefficients."""
    result: Tensor = _Propagate.apply(x, source, target, coefficient)  # type: ignore[no-untyped-call]
    return result


class _Propagate(torch.autograd.Function):
    """Messages of a few edges at a time: all of them, [E, D], would outweigh the vertices many times over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor, coefficient: Tensor) -> Tensor:
        ctx.save_for_backward(source, target, coefficient)
        return _scatter(x, source, target, coefficient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, target, coefficient = ctx.saved_tensors
        return _scatter(grad, target, source, coefficient), None, None, None


def _scatter(x: Tensor, source: Tensor, target: Tensor, coefficient: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for first in range(0, len(source), EDGES_AT_A_TIME):
        piece = slice(first, first + EDGES_AT_A_TIME)
        out.index_add_(0, target[piece], coefficient[piece, None] * x[source[piece]])
    return out
