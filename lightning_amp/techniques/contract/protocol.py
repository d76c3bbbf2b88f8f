"""Define the structure that techniques require of a module; it is detected, no base class is needed.

Legend: cell, anchor (N), dim (D), row (anchors of a run of buckets), feature (F_k of one stratum),
own_feature and own_vertex (those that a rank holds).
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeGuard, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.shapes import FeatureAnchor, OwnCounts, PerAnchor
from lightning_amp.techniques.contract.stand_in import named_parts


class DecomposedDecoder(Protocol):
    """A decoder whose loss is a sum over strata, each a function of the anchors and the cells.

    `strata[k](v, u, ...)` returns the negative log-likelihood summed over cells and features, and v for the
    next stratum. A stratum that reads a run of columns of a parameter may say so by `runs`, the parameter's name to a
    slice; it then finds the parameter, or just these columns, under the name.

    Test for it with `is_decomposed`: from Python 3.12 on `isinstance` does not see the children of a module.
    """

    strata: nn.ModuleList
    chained: bool
    n_anchors: int
    dim: int


@runtime_checkable
class BucketedAttention(Protocol):
    """Attention between neighbouring buckets of anchors, bucket by bucket."""

    def n_buckets(self, n: int) -> int:
        """Buckets that n anchors fill."""
        ...

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> tuple[Tensor, ...]:
        """What `attend` reads, made once for all buckets."""
        ...

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row dim"]:
        """Rows of the buckets [first, last)."""
        ...


Messages = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Makes source, target and coefficient of all edges of a graph."""


FEATURE_METHODS = ("own", "scores", "log_softmax", "whole")
"""Methods of a stratum's child `features`: which features the device holds; the reference is models' AllFeatures."""

VERTEX_METHODS = ("propagate", "add_messages", "blocks", "noise", "mean", "rows")
"""Methods of a graph encoder's child `vertices`: which vertices the device holds; the reference is AllVertices."""


def has_methods(module: object, names: Iterable[str]) -> bool:
    """Whether a module has all methods of some names."""
    return isinstance(module, nn.Module) and all(callable(getattr(module, name, None)) for name in names)


class VertexEncoder(Protocol):
    """An encoder of a graph's vertices, whose children `loc` and `std` work row by row.

    `rows` has a child for every modality that takes v to what the modality's decoder gets: the rows of its vertices,
    which are its buffer `ids` and, in the host's memory, its attribute `on_host`. `ends` are source and target of the
    edges in both directions, in the host's memory too; `messages` has them on the device, with coefficients.
    Test for it with `is_vertex_encoder`.
    """

    n_vertices: int
    ends: tuple[Tensor, Tensor]
    messages: Messages
    embedding: nn.Parameter
    loc: nn.Module
    std: nn.Module
    vertices: Any
    rows: nn.ModuleDict


@runtime_checkable
class ShardableAttention(BucketedAttention, Protocol):
    """Bucketed attention that can also be computed for some of the channels."""

    def shard(self, pairs: slice, total: Callable[[Tensor], Tensor]) -> nn.Module:
        """The same for the channels i and i + D/2 of the given i, in this order.

        Args:
            pairs: The i, a run in [0, D/2).
            total: Sums a tensor over all ranks' channels, forward and backward; every call is a collective.
        """
        ...


@runtime_checkable
class ScattersFeatures(Protocol):
    """A decode that can hand each feature's score, summed over the ranks, to only the feature's owner."""

    def scatter(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        feature_anchor: FeatureAnchor,
        run: int,
    ) -> OwnCounts:
        """Columns [rank * run, (rank + 1) * run) of (u key^T)[:, feature_anchor], as far as there are any."""
        ...


ATTENTION_KEY = ("prenorm", "qk", "value", "attention", "postnorm", "ff")
"""Children of an attention key. It computes with them, and with functions that do not mix channels (for nodes:
anchors), which is probed (checks/key.py),

    p = prenorm(v),  q = qk(p),  val = value(p),  attention(q, q, p or val),  ff(postnorm(...))

where ff gives 2 D channels that are cut in two halves of D, which meet channel by channel (GEGLU)."""

CONVOLUTION_KEY = ("pairs", "activation")
"""Children of a convolution key: a depthwise convolution over the anchors and a function of single numbers; the same is
probed."""


def is_decomposed(module: object) -> TypeGuard[DecomposedDecoder]:
    """Whether a module is a decomposed decoder."""
    has_all = all(hasattr(module, name) for name in ("chained", "n_anchors", "dim"))
    return has_all and isinstance(getattr(module, "strata", None), nn.ModuleList)


def is_vertex_encoder(module: object) -> TypeGuard[VertexEncoder]:
    """Whether a module encodes the vertices of a graph, with the leaves that can be sharded to ranks."""
    has_all = all(hasattr(module, name) for name in ("n_vertices", "ends", "messages", "loc", "std"))
    return (
        has_all
        and isinstance(getattr(module, "embedding", None), nn.Parameter)
        and has_methods(getattr(module, "vertices", None), VERTEX_METHODS)
        and isinstance(getattr(module, "rows", None), nn.ModuleDict)
    )


def find_decoders(module: nn.Module) -> dict[str, DecomposedDecoder]:
    """The decomposed decoders in a module by name; what lies inside a decoder is not looked at."""
    found: dict[str, DecomposedDecoder] = {}
    for fqn, child in named_parts(module):
        inside = any(not outer or fqn.startswith(f"{outer}.") for outer in found)
        if not inside and is_decomposed(child):
            found[fqn] = child
    return found
