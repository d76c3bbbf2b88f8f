"""What a module must look like to take part; the shapes are recognised, no base class is asked for.

Legend: cell, anchor (N), dim (D), row (anchors of a run of buckets), feature (F_k of one stratum),
own_feature (those that a rank holds).
"""

from collections.abc import Callable
from typing import Protocol, TypeGuard, runtime_checkable

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn


class DecomposedDecoder(Protocol):
    """A decoder whose loss is a sum over strata, each a function of the anchors and the cells.

    `strata[k](v, u, ...)` returns the negative log-likelihood summed over cells and features, and v for the
    next stratum. Test for it with `is_decomposed`: from Python 3.12 `isinstance` does not see the children of
    a module, so it is not offered.
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

    def prepare(
        self,
        q: Float[Tensor, "anchor dim"],
        k: Float[Tensor, "anchor dim"],
        values: Float[Tensor, "anchor dim"],
    ) -> tuple[Tensor, ...]:
        """What `attend` reads, made once for all buckets."""
        ...

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row dim"]:
        """Rows of the buckets [first, last)."""
        ...


@runtime_checkable
class Decodes(Protocol):
    """Inner products of cells with the keys of a stratum's features, called as `decode(u, key, nodes)`."""

    def forward(
        self,
        u: Float[Tensor, "cell dim"],
        key: Float[Tensor, "anchor dim"],
        nodes: Int[Tensor, " feature"],
    ) -> Float[Tensor, "cell feature"]:
        """(u key^T)[:, nodes]."""
        ...


@runtime_checkable
class HoldsFeatures(Protocol):
    """What a device does with the features of a stratum: it holds all of them, or its own."""

    def own(self, values: Shaped[Tensor, "*row feature"]) -> Shaped[Tensor, "*row own_feature"]:
        """The columns of the features that this device holds."""
        ...

    def scores(
        self,
        decode: Callable[[Tensor, Tensor, Tensor], Tensor],
        u: Float[Tensor, "cell dim"],
        key: Float[Tensor, "anchor dim"],
        nodes: Int[Tensor, " feature"],
    ) -> Float[Tensor, "cell own_feature"]:
        """Decoded scores of the own features; `nodes` are those of all."""
        ...

    def log_softmax(self, logits: Float[Tensor, "cell own_feature"]) -> Float[Tensor, "cell own_feature"]:
        """Logarithm of the softmax over all features, for the own ones."""
        ...

    def whole(self, values: Float[Tensor, "cell own_feature"]) -> Float[Tensor, "cell feature"]:
        """All columns again."""
        ...


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
class ScattersFeatures(Decodes, Protocol):
    """A decode that can hand each feature's score, summed over the ranks, to the feature's owner alone."""

    def scatter(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        nodes: Int[Tensor, " feature"],
        run: int,
    ) -> Float[Tensor, "cell own_feature"]:
        """Columns [rank * run, (rank + 1) * run) of (u key^T)[:, nodes], as far as there are any."""
        ...


ATTENTION_KEY = ("prenorm", "qk", "value", "attention", "postnorm", "ff")
"""Children of an attention key. It computes with them, and with functions that do not mix channels,

    p = prenorm(v),  q = qk(p),  val = value(p),  attention(q, q, p or val),  ff(postnorm(...))

where ff gives 2 D channels that are cut in two halves of D, which meet channel by channel (GEGLU)."""

CONVOLUTION_KEY = ("pairs", "activation")
"""Children of a convolution key: a depthwise convolution over the anchors and a function of single numbers."""


def is_decomposed(module: object) -> TypeGuard[DecomposedDecoder]:
    """Whether a module is a decomposed decoder."""
    has_all = all(hasattr(module, name) for name in ("chained", "n_anchors", "dim"))
    return has_all and isinstance(getattr(module, "strata", None), nn.ModuleList)


def find_decoders(module: nn.Module) -> dict[str, DecomposedDecoder]:
    """The decomposed decoders in a module by name; what lies inside a decoder is not looked at."""
    found: dict[str, DecomposedDecoder] = {}
    for fqn, child in module.named_modules():
        inside = any(not outer or fqn.startswith(f"{outer}.") for outer in found)
        if not inside and is_decomposed(child):
            found[fqn] = child
    return found
