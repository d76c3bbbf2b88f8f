"""Compute terms of a decoder's strata on one rank, once for all plans that share them.

A term is what a model counts of one stratum, such as the bytes that its likelihood keeps. It names the axes of a plan
that it reads and is shown no others, so that one which reads more fails at once instead of handing out another plan's
number. Of the hundreds of plans that are compared most differ in an axis that a term does not read.

A stratum by itself is the same whether other ranks run the other strata or not: under strata parallelism, and where the
model axis splits nothing, terms are those of one rank.
"""

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.sizes.rank_sizes import RankSizes

Sizes = TypeVar("Sizes", bound=RankSizes)
Counted = TypeVar("Counted")
KEPT = 32
"""Decoders on one rank whose terms are remembered: of time and of memory, for every length of the model axis."""


class Term(Generic[Sizes, Counted]):
    """What a model counts of a stratum.

    Args:
        count: Sizes of the stratum -> what is counted.
        reads: The axes of a plan that it depends on.
        of_features: Whether it depends on the stratum's features; else strata with a key share it, and so do
            those without.
    """

    def __init__(self, count: Callable[[Sizes], Counted], *reads: str, of_features: bool = True) -> None:
        self.count, self.reads, self.of_features = count, reads, of_features


class Strata(Generic[Sizes]):
    """All strata of a decoder on one rank, and the terms of them that were requested.

    Args:
        kind: Type of the sizes that terms are counted from.
        sizes: The other fields of `kind`: cells, ranks, bytes per element, rates.
    """

    def __init__(self, kind: type[Sizes], decoder: DecoderShape, **sizes: Any) -> None:
        self._kind, self._decoder, self._sizes = kind, decoder, sizes
        self._found: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def column(self, term: Term[Sizes, Counted], axes: Axes) -> tuple[Counted, ...]:
        """A term of every stratum, under the choices of a plan."""
        seen = {axis: getattr(axes, axis) for axis in term.reads}
        if seen.get("placement") == "strata":
            seen["placement"] = "replicated"
        key = (term, *seen.values())
        if key not in self._found:
            self._found[key] = self._counted(term, cast(Axes, SimpleNamespace(**seen)))
        return self._found[key]

    def _counted(self, term: Term[Sizes, Counted], axes: Axes) -> tuple[Counted, ...]:
        distances = self._decoder.distances

        def count(k: int) -> Counted:
            return term.count(self._kind(decoder=self._decoder, axes=axes, k=k, **self._sizes))

        if term.of_features:
            return tuple(map(count, range(len(distances))))
        alike = {keyed: count(k) for keyed, k in {k > 0: n for n, k in enumerate(distances)}.items()}
        return tuple(alike[k > 0] for k in distances)


same_strata = lru_cache(maxsize=KEPT)(Strata)


def strata_of(kind: type[Sizes], decoder: DecoderShape, axes: Axes, *, ranks: int, **sizes: Any) -> Strata[Sizes]:
    """The strata of a decoder under the choices of a plan, as `Strata`: the same object for the same sizes."""
    split = axes.placement not in ("replicated", "strata") or axes.features == "sharded"
    return cast(Strata[Sizes], same_strata(cast(Any, kind), decoder, ranks=ranks if split else 1, **sizes))
