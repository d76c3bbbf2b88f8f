"""What a module must look like to take part; the shapes are recognised, no base class is asked for.

Legend: cell, anchor (N), dim (D), row (anchors of a run of buckets), feature (F_k of one stratum).
"""

from typing import Protocol, TypeGuard, runtime_checkable

from jaxtyping import Float, Int
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
