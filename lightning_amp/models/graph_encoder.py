"""Encode vertices of the guidance graph as latents v, with the likelihood of the graph's edges given v.

    h = A embedding,  A_st = sign w / sqrt(d_s d_t),  d_s = sum of w over the edges of s
    v ~ Normal(h W_loc^T + b, softplus(h W_std^T + b) + 1e-7)
    edge of sign s between i and j: Bernoulli(logit = s <v_i, v_j>)

Positive edges are drawn in proportion to their weight; negative ones keep source and sign and take a target
drawn uniformly (which may happen to be a neighbour). The two kinds are averaged separately.

The leaves `vertices` (messages, noise, means, ends of edges) and `rows` (rows of v for one modality's decoder) contain
all code that reads other vertices. So a technique can shard the vertices: embedding, loc, std and v then have the rows
of one device. Legend: vertex (V), own_vertex (vertices of a device), dim (D), edge (E of the symmetrised graph).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.models.latents import LEAST_STD, Latent, divergence
from lightning_amp.shapes import PerVertex, Scalar
from lightning_amp.techniques.contract.protocol import Messages

EDGES_AT_A_TIME = 65_536
ROWS_AT_A_TIME = 65_536


class AllVertices(nn.Module):
    """All vertices on one device; a leaf module, so that a technique can shard them."""

    def propagate(self, x: PerVertex, messages: Messages) -> PerVertex:
        """Sum coefficient * x[source] over the edges of each target; the coefficients get no gradient."""
        result: Tensor = _Propagate.apply(x, *messages())  # type: ignore[no-untyped-call]
        return result

    def add_messages(self, out: Tensor, x: Tensor, **edges: Tensor) -> None:
        """Add the messages of some edges to `out`, without gradients; `edges` as in the function `add_messages`."""
        add_messages(out, x, **edges)

    def blocks(
        self, n_vertices: int, like: Float[Tensor, "row dim"], generator: torch.Generator | None
    ) -> Iterator[tuple[int, Float[Tensor, "block dim"]]]:
        """Yield standard normal noise of all vertices in blocks: first vertex, noise."""
        # in blocks: a rank with a shard of the vertices draws the noise of all, but stores one block
        for first in range(0, n_vertices, ROWS_AT_A_TIME):
            size = (min(ROWS_AT_A_TIME, n_vertices - first), like.shape[1])
            yield first, torch.randn(size, dtype=like.dtype, device=like.device, generator=generator)

    def noise(self, like: PerVertex, generator: torch.Generator | None) -> PerVertex:
        """Return standard normal noise of this device's vertices."""
        noise = torch.empty_like(like)
        for first, block in self.blocks(len(like), like, generator):
            noise[first : first + len(block)] = block
        return noise

    def mean(self, values: Float[Tensor, " own_vertex"]) -> Scalar:
        """Return the mean over all vertices."""
        return values.mean()

    def rows(self, v: PerVertex, *ids: Int[Tensor, "*end"]) -> tuple[Tensor, ...]:
        """Return the rows of any vertices by their ids; each [*end, dim]."""
        return tuple(v[i] for i in ids)


class FeatureVertices(nn.Module):
    """Vertices that are features of one modality (for Hi-C, anchors); a leaf module."""

    ids: Tensor

    def __init__(self, ids: Int[Tensor, " feature"]):
        super().__init__()
        self.on_host = ids  # ids in host memory, for techniques that shard vertices
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, v: PerVertex) -> Float[Tensor, "feature dim"]:
        """Return the rows of v for the modality's decoder."""
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

    The edges are processed in blocks: all messages, [E, D], would be much larger than the vertices.
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
        # the adjoint of the sum is the same sum over reversed edges
        add_messages(out, grad, source=target, target=source, coefficient=coefficient)
        return out, None, None, None


class GraphEncoder(nn.Module):
    """Latents of the vertices, and the likelihood of sampled edges."""

    source: Tensor
    target: Tensor
    weight: Tensor
    sign: Tensor

    def __init__(
        self,
        n_vertices: int,
        dim: int,
        *,
        source: Int[Tensor, " edge"],  # one end of each edge
        target: Int[Tensor, " edge"],  # the other end; each edge is listed in one direction and means both
        weight: Float[Tensor, " edge"],  # positive weight of each edge
        sign: Float[Tensor, " edge"],  # +1 or -1
        modalities: Mapping[str, Int[Tensor, " feature"]] | None = None,
    ):
        super().__init__()
        if len(weight) == 0 or not bool((weight > 0).all()):
            raise ModelError(
                f"the guidance graph has {len(weight)!r} edges with weights from "
                f"{min(weight.tolist(), default=None)!r}; it needs at least one edge, and positive weights"
            )
        # a self-loop equals its reverse, and would count twice
        one_way = source != target
        self.n_vertices = n_vertices
        ends = torch.cat((source, target[one_way])), torch.cat((target, source[one_way]))
        self.ends = ends  # source and target of the edges in both directions, in host memory
        self.register_buffer("source", ends[0], persistent=False)
        self.register_buffer("target", ends[1], persistent=False)
        self.register_buffer("weight", torch.cat((weight, weight[one_way])), persistent=False)
        self.register_buffer("sign", torch.cat((sign, sign[one_way])), persistent=False)
        self.embedding = nn.Parameter(torch.randn(n_vertices, dim) * dim**-0.5)
        self.loc = nn.Linear(dim, dim)
        self.std = nn.Linear(dim, dim)
        self.vertices = AllVertices()  # code that reads other vertices
        # by modality: selects the rows of its features from v
        self.rows = nn.ModuleDict({name: FeatureVertices(ids) for name, ids in (modalities or {}).items()})

    def forward(self) -> tuple[PerVertex, PerVertex]:
        """Return mean and standard deviation of v."""
        h = self.vertices.propagate(self.embedding, self.messages)
        return self.loc(h), F.softplus(self.std(h)) + LEAST_STD

    def messages(self) -> tuple[Int[Tensor, " edge"], Int[Tensor, " edge"], Float[Tensor, " edge"]]:
        """Return source, target and coefficient of all edges."""
        degree = self.weight.new_zeros(self.n_vertices).index_add_(0, self.source, self.weight)
        coefficient = self.sign * self.weight * (degree[self.source] * degree[self.target]).rsqrt()
        return self.source, self.target, coefficient

    def sample(self, loc: PerVertex, std: PerVertex, generator: torch.Generator | None = None) -> Latent:
        """Draw v from Normal(loc, std); None is the default generator."""
        return Latent(loc, std, loc + std * self.vertices.noise(loc, generator))

    def kl(self, loc: PerVertex, std: PerVertex) -> Scalar:
        """Return the divergence of Normal(loc, std) from the standard normal: mean over vertices, divided by V."""
        return self.vertices.mean(divergence(loc, std)) / self.n_vertices

    def nll(self, v: PerVertex, *, n_positive: int, negatives: int, generator: torch.Generator | None = None) -> Scalar:
        """Return the negative log-likelihood of sampled edges: the average of the means of positives and negatives."""
        # on a GPU, torch's cumsum is not deterministic, and raises under deterministic algorithms
        on_host = self.weight.is_cuda and torch.are_deterministic_algorithms_enabled()
        weight = self.weight.cpu() if on_host else self.weight
        cumulative = weight.cumsum(0, dtype=torch.float64).to(v.device)
        uniform = torch.rand(n_positive, dtype=torch.float64, device=v.device, generator=generator)
        # right=True: an edge owns the numbers from the previous cumulative sum up to its own, exclusive: uniform
        # numbers lie in [0, 1). The clamp: rounding may bring a product up to the sum of all weights
        edge = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp_max(len(cumulative) - 1)
        size = (n_positive, negatives)
        other = torch.randint(self.n_vertices, size, device=v.device, generator=generator)
        source, target, others = self.vertices.rows(v, self.source[edge], self.target[edge], other)
        sign = self.sign[edge]
        positive = F.logsigmoid(sign * (source * target).sum(-1))
        negative = F.logsigmoid(-sign[:, None] * (others @ source[:, :, None]).squeeze(-1))
        return -(positive.mean() + negative.mean()) / 2
