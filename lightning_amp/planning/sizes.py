"""Compute the sizes of one stratum on one rank under a plan: anchors, channels, features, scores, buckets.

The memory model and the cost model read the same sizes. They differ where ranks share unevenly: memory asks for the
most that a rank has of a stratum (`most_`) and for one block of cells (`block_`), time for the mean (`mean_`) and for
all cells of the batch (`batch_`).

Legend: B cells, N anchors, w attention window, D latent dimension, F_k features of the stratum, R ranks of the model
axis; n own anchors, p = n padded to whole buckets, d own channels, a channels that attention multiplies. Of ranks that
share unevenly it is the one that has most.

Terms of a decoder's strata on one rank are computed once for all plans that share them. A term is what a model counts
of one stratum, such as the bytes that its likelihood keeps. It names the axes of a plan that it reads and is shown no
others, so that one which reads more fails at once instead of handing out another plan's number. Of the hundreds of
plans that are compared most differ in an axis that a term does not read.

A stratum by itself is the same whether other ranks run the other strata or not: under strata parallelism, and where the
model axis splits nothing, terms are those of one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.techniques.hic.attention.bucket_runs import Band, KernelCalls, calls_of, run_sizes
from lightning_amp.techniques.hic.rows import (
    AGAIN,
    STREAMED,
    block_cells,
    chunk_buckets,
    keeps_weights,
    sparse_columns,
    strata_side_by_side,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """One stratum on one rank.

    Attributes:
        k: The stratum, 0 to K - 1; under strata parallelism it is a rank's own.
        element: Bytes per number.
    """

    decoder: DecoderShape
    axes: Axes
    k: int
    cells: int
    ranks: int = 1
    element: int = 4

    @property
    def keyed(self) -> bool:
        """Whether the stratum makes its own key; else the anchors are its keys."""
        return self.decoder.distances[self.k] > 0

    @property
    def attends(self) -> bool:
        """Whether it makes the key by attention."""
        return self.keyed and self.decoder.attention

    @property
    def paper(self) -> bool:
        """Whether the key has the paper's form: no second norm, no residual."""
        return self.decoder.variant == "paper"

    @property
    def streamed(self) -> bool:
        """Whether cells come in blocks."""
        return self.axes.activations == STREAMED

    @property
    def recomputed(self) -> bool:
        """Whether the forward pass is run again in the backward pass."""
        return self.axes.activations == AGAIN

    @property
    def fused(self) -> bool:
        """Whether attention keeps nothing but what it is given."""
        return self.axes.attention == "fused"

    @property
    def in_kernels(self) -> bool:
        """Whether attention is computed in torch's fused kernels."""
        return self.axes.attention == "sdpa"

    @property
    def sparse(self) -> bool:
        """Whether the likelihood is computed from the counts that are not zero."""
        return self.axes.likelihood == "sparse"

    @property
    def hidden(self) -> bool:
        """Whether channels are split (S5)."""
        return self.axes.placement in ("hidden", "hidden-gathered") and self.ranks > 1

    @property
    def gathered(self) -> bool:
        """Whether S5 gathers keys and values for attention."""
        return self.axes.placement == "hidden-gathered" and self.ranks > 1

    @property
    def by_nodes(self) -> bool:
        """Whether anchors are split."""
        return self.axes.placement == "nodes" and self.ranks > 1

    @property
    def by_features(self) -> bool:
        """Whether features are split (S2)."""
        return self.axes.features == "sharded" and self.ranks > 1

    @property
    def neighbours(self) -> int:
        """Ranks with anchors next to the own ones, whose rows local attention needs."""
        return min(2, self.ranks - 1) if self.by_nodes and not self.decoder.full else 0

    @property
    def anchors(self) -> int:
        """n."""
        anchors, window = self.decoder.anchors, self.decoder.window
        buckets = -(-anchors // window)
        return min(anchors, -(-buckets // self.ranks) * window) if self.by_nodes else anchors

    @property
    def halo(self) -> int:
        """Keys of neighbours that the own anchors meet under nodes: a bucket of each."""
        return self.neighbours * self.decoder.window

    @property
    def padded(self) -> int:
        """p."""
        return -(-self.anchors // self.decoder.window) * self.decoder.window

    @property
    def ragged(self) -> bool:
        """Whether anchors do not fill the last bucket, of some rank."""
        return self.decoder.anchors % self.decoder.window > 0

    @property
    def queries(self) -> int:
        """Queries that attention takes at a time: under S3 those of a chunk, else all p."""
        if not self.axes.attention.startswith("chunked"):
            return self.padded
        return min(self.padded, chunk_buckets(self.decoder.window) * self.decoder.window)

    @property
    def chunks(self) -> int:
        """Chunks of queries; one without S3."""
        return -(-self.padded // self.queries)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that attention multiplies: p 3 w, of full attention n N.

        fused and sdpa leave out what is masked.
        """
        if self.decoder.full:
            return self.anchors * self.decoder.anchors
        if self.in_kernels:
            return self.decoder.window**2 * sum(run.slots for run in self.kernel_calls)
        if not self.fused:
            return 3 * self.decoder.window * self.padded
        return sum(run.n_pairs for band in self.bands for run in band.runs)

    @property
    def width(self) -> int:
        """d."""
        return widest(self.decoder.dim, self.ranks) if self.hidden else self.decoder.dim

    @property
    def attended(self) -> int:
        """a."""
        return self.decoder.dim if self.gathered else self.width

    @property
    def latents(self) -> int:
        """n d: numbers of a tensor [n, d], as most tensors of a key are."""
        return self.anchors * self.width

    @property
    def partial_products(self) -> int:
        """R n d: what S5 multiplies before the ranks' products are summed; 0 without S5."""
        return self.ranks * self.latents if self.hidden else 0

    @property
    def block(self) -> int:
        """Cells of a block: B, or under stream at most those that the largest stratum leaves room for."""
        if not self.streamed:
            return self.cells
        d = self.decoder
        return min(self.cells, block_cells(max(d.features), anchors=d.anchors, launched=d.launched))

    @property
    def blocks(self) -> int:
        """Blocks of cells."""
        return -(-self.cells // self.block)

    @property
    def stratum_features(self) -> int:
        """F_k, of all ranks together."""
        return self.decoder.features[self.k]

    @property
    def most_features(self) -> int:
        """Features of the rank with most: a stratum has one feature of an anchor at most."""
        if self.by_nodes:
            return min(self.stratum_features, self.anchors)
        return self._share_of_features

    @property
    def mean_features(self) -> int:
        """Features of a rank, as many as its share of the anchors."""
        if self.by_nodes:
            return -(-self.stratum_features * self.anchors // self.decoder.anchors)
        return self._share_of_features

    @property
    def _share_of_features(self) -> int:
        return -(-self.stratum_features // self.ranks) if self.by_features else self.stratum_features

    @property
    def most_decoded(self) -> int:
        """Features that the rank with most decodes: under S5 F_k, for it has a part of every score."""
        return self.stratum_features if self.hidden else self.most_features

    @property
    def mean_decoded(self) -> int:
        """Features that a rank decodes."""
        return self.stratum_features if self.hidden else self.mean_features

    @property
    def block_scores(self) -> int:
        """Scores of one block of cells on the rank with most features."""
        return self.block * self.most_features

    @property
    def batch_scores(self) -> int:
        """Scores of all cells of the batch."""
        return self.cells * self.mean_features

    @property
    def keeps_weights(self) -> bool:
        """Whether fused attention keeps its weights."""
        return self.streamed and self.fused and keeps_weights(self.decoder.anchors, window=self.decoder.window)

    @property
    def kept_weights(self) -> int:
        """Attention weights that are kept: 3 w of every anchor, less what lies outside the sequence."""
        if not (self.attends and self.keeps_weights):
            return 0
        return sum(run.n_scores for band in self.bands for run in band.runs)

    @property
    def bands(self) -> tuple[Band, ...]:
        """The calls of fused attention: all anchors; under nodes the inner buckets, and one for every outer one."""
        w, n_buckets = self.decoder.window, self.padded // self.decoder.window
        sizes = run_sizes(w, launched=self.launched)
        if not self.neighbours:
            return (Band(self.anchors, self.anchors, w, 0, sizes),)
        # an outer bucket meets keys of another rank, which are under way while the inner ones are computed: each is a
        # call by itself, with three buckets of keys
        outer = min(n_buckets, self.neighbours)
        # of ranks between two others, or of the first of two
        before = w if outer == 2 else 0
        inner = Band((n_buckets - outer) * w, self.padded, w, before, sizes)
        return (inner, *(Band(w, 3 * w, w, w, sizes) for _ in range(outer)))

    @property
    def bands_at_the_end(self) -> tuple[Band, ...]:
        """Of the last rank under nodes, whose last bucket may be cut short; of as many anchors."""
        if not self.neighbours:
            return self.bands
        w, rest = self.decoder.window, -self.decoder.anchors % self.decoder.window
        sizes = run_sizes(w, launched=self.launched)
        return (Band(max(self.padded - w - rest, 0), self.padded - rest, w, w, sizes),)

    @property
    def kernel_calls(self) -> tuple[KernelCalls, ...]:
        """The calls of attention in torch's kernels: of all anchors; under nodes of every band."""
        return tuple(map(calls_of, self.bands))

    @property
    def sparse_columns(self) -> int:
        """Columns of a sparse likelihood that are computed at a time."""
        return sparse_columns(self.block, launched=self.launched)

    @property
    def launched(self) -> bool:
        """Whether the device has its kernels launched, as all have but a CPU."""
        return self.decoder.launched

    @property
    def side_by_side(self) -> int:
        """Strata that run at the same time; ranks that compute one together take them in one order, and torch.compile
        has its settings for the whole process.
        """
        alone = self.axes.placement in ("replicated", "strata") and not self.by_features
        alone = alone and self.axes.kernels == "eager"
        if not (self.streamed and alone):
            return 1
        return strata_side_by_side(self.decoder.threads, anchors=self.anchors, dim=self.decoder.dim)


def widest(dim: int, ranks: int) -> int:
    """d: channels of the rank that has most; pairs stay together where D is even."""
    return 2 * -(-dim // (2 * ranks)) if dim % 2 == 0 else -(-dim // ranks)


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
            # a stratum is computed by one rank as on one device, so both share what was counted
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
        # without its features a stratum differs from others only in whether it makes a key, so that one of either kind
        # is counted, however many there are
        alike = {keyed: count(k) for keyed, k in {k > 0: n for n, k in enumerate(distances)}.items()}
        return tuple(alike[k > 0] for k in distances)


same_strata = lru_cache(maxsize=KEPT)(Strata)


def strata_of(kind: type[Sizes], decoder: DecoderShape, axes: Axes, *, ranks: int, **sizes: Any) -> Strata[Sizes]:
    """The strata of a decoder under the choices of a plan, as `Strata`: the same object for the same sizes."""
    # a decoder that nothing splits has the same terms for every length of the model axis: one entry for all of them
    split = axes.placement not in ("replicated", "strata") or axes.features == "sharded"
    return cast(Strata[Sizes], same_strata(cast(Any, kind), decoder, ranks=ranks if split else 1, **sizes))
