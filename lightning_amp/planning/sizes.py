"""Compute the sizes of one stratum on one rank under a plan: anchors, channels, features, scores, buckets.

The memory model and the cost model read the same sizes. They differ if shards are uneven: memory uses the maximum over
ranks (`most_`) and one block of cells (`block_`), time uses the mean (`mean_`) and all cells of the batch (`batch_`).

Legend: B cells, N anchors, w attention window, D latent dimension, F_k features of the stratum, R ranks of the model
axis; n own anchors, p = n padded to full buckets, d own channels, a channels that attention multiplies. If shards are
uneven, n, p and d are those of the rank that has most.

A term is a number that a model counts for one stratum, such as the bytes that its likelihood keeps. Terms of a
decoder's strata on one rank are computed once for all plans that share them: most of the hundreds of compared plans
differ in an axis that a term does not read. A term declares the axes of a plan that it reads and gets no others, so
that reading an undeclared axis raises an error instead of returning another plan's number.

A stratum takes the same bytes and time whether or not other ranks run the other strata: under strata parallelism, and
if the model axis shards nothing, terms are those of one rank.
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
    """Sizes of one stratum on one rank.

    Attributes:
        k: The stratum, 0 to K - 1; under strata parallelism, one of the rank's own strata.
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
        """Whether the stratum makes a key; otherwise the anchors are its keys."""
        return self.decoder.distances[self.k] > 0

    @property
    def attends(self) -> bool:
        """Whether the stratum makes its key by attention."""
        return self.keyed and self.decoder.attention

    @property
    def paper(self) -> bool:
        """Whether the key has the paper's form: no second norm, no residual."""
        return self.decoder.variant == "paper"

    @property
    def streamed(self) -> bool:
        """Whether cells are processed in blocks."""
        return self.axes.activations == STREAMED

    @property
    def recomputed(self) -> bool:
        """Whether the forward pass is run again in the backward pass."""
        return self.axes.activations == AGAIN

    @property
    def fused(self) -> bool:
        """Whether attention saves nothing but its inputs."""
        return self.axes.attention == "fused"

    @property
    def in_kernels(self) -> bool:
        """Whether attention runs in torch's fused kernels."""
        return self.axes.attention == "sdpa"

    @property
    def sparse(self) -> bool:
        """Whether the likelihood is computed from the nonzero counts."""
        return self.axes.likelihood == "sparse"

    @property
    def hidden(self) -> bool:
        """Whether channels are sharded (S5)."""
        return self.axes.placement in ("hidden", "hidden-gathered") and self.ranks > 1

    @property
    def gathered(self) -> bool:
        """Whether S5 gathers keys and values for attention."""
        return self.axes.placement == "hidden-gathered" and self.ranks > 1

    @property
    def by_nodes(self) -> bool:
        """Whether anchors are sharded."""
        return self.axes.placement == "nodes" and self.ranks > 1

    @property
    def by_features(self) -> bool:
        """Whether features are sharded (S2)."""
        return self.axes.features == "sharded" and self.ranks > 1

    @property
    def neighbours(self) -> int:
        """Number of neighbouring ranks whose rows local attention requires."""
        return min(2, self.ranks - 1) if self.by_nodes and not self.decoder.full else 0

    @property
    def anchors(self) -> int:
        """Own anchors, n."""
        anchors, window = self.decoder.anchors, self.decoder.window
        buckets = -(-anchors // window)
        return min(anchors, -(-buckets // self.ranks) * window) if self.by_nodes else anchors

    @property
    def halo(self) -> int:
        """Keys of neighbours that the own anchors attend to under nodes: one bucket of each neighbour."""
        return self.neighbours * self.decoder.window

    @property
    def padded(self) -> int:
        """Own anchors padded to full buckets, p."""
        return -(-self.anchors // self.decoder.window) * self.decoder.window

    @property
    def ragged(self) -> bool:
        """Whether the last bucket of some rank is not full."""
        return self.decoder.anchors % self.decoder.window > 0

    @property
    def queries(self) -> int:
        """Queries that attention computes at a time: under S3 those of a chunk, else all p."""
        if not self.axes.attention.startswith("chunked"):
            return self.padded
        return min(self.padded, chunk_buckets(self.decoder.window, self.decoder.queries) * self.decoder.window)

    @property
    def chunks(self) -> int:
        """Number of chunks of queries; one without S3."""
        return -(-self.padded // self.queries)

    @property
    def pairs(self) -> int:
        """Multiplied pairs of a query and a key: p 3 w, for full attention n N; fused and sdpa skip masked pairs."""
        if self.decoder.full:
            return self.anchors * self.decoder.anchors
        if self.in_kernels:
            return self.decoder.window**2 * sum(run.slots for run in self.kernel_calls)
        if not self.fused:
            return 3 * self.decoder.window * self.padded
        return sum(run.n_pairs for band in self.bands for run in band.runs)

    @property
    def width(self) -> int:
        """Own channels, d."""
        return widest(self.decoder.dim, self.ranks) if self.hidden else self.decoder.dim

    @property
    def attended(self) -> int:
        """Channels that attention multiplies, a."""
        return self.decoder.dim if self.gathered else self.width

    @property
    def latents(self) -> int:
        """n d: elements of a tensor [n, d], the shape of most tensors of a key."""
        return self.anchors * self.width

    @property
    def partial_products(self) -> int:
        """R n d: elements of S5's products before they are summed over the ranks; 0 without S5."""
        return self.ranks * self.latents if self.hidden else 0

    @property
    def block(self) -> int:
        """Cells of a block: B, or under stream at most as many as the largest stratum leaves room for."""
        if not self.streamed:
            return self.cells
        d = self.decoder
        return min(self.cells, block_cells(max(d.features), anchors=d.anchors, launched=d.launched))

    @property
    def blocks(self) -> int:
        """Number of blocks of cells."""
        return -(-self.cells // self.block)

    @property
    def stratum_features(self) -> int:
        """F_k, over all ranks."""
        return self.decoder.features[self.k]

    @property
    def most_features(self) -> int:
        """Features of the rank that has most; a stratum has at most one feature per anchor."""
        if self.by_nodes:
            return min(self.stratum_features, self.anchors)
        return self._share_of_features

    @property
    def mean_features(self) -> int:
        """Features of a rank, proportional to its share of the anchors."""
        if self.by_nodes:
            return -(-self.stratum_features * self.anchors // self.decoder.anchors)
        return self._share_of_features

    @property
    def _share_of_features(self) -> int:
        return -(-self.stratum_features // self.ranks) if self.by_features else self.stratum_features

    @property
    def most_decoded(self) -> int:
        """Features decoded by the rank that has most: F_k under S5, where every rank has a term of each score."""
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
        """Whether fused attention keeps its weights for the backward pass."""
        return self.streamed and self.fused and keeps_weights(self.decoder.anchors, window=self.decoder.window)

    @property
    def kept_weights(self) -> int:
        """Number of attention weights that are kept: 3 w per anchor, without pairs outside the sequence."""
        if not (self.attends and self.keeps_weights):
            return 0
        return sum(run.n_scores for band in self.bands for run in band.runs)

    @property
    def bands(self) -> tuple[Band, ...]:
        """Calls of fused attention: all anchors; under nodes the inner buckets, and one call per outer bucket."""
        w, n_buckets = self.decoder.window, self.padded // self.decoder.window
        sizes = run_sizes(w, launched=self.launched)
        if not self.neighbours:
            return (Band(self.anchors, self.anchors, w, 0, sizes),)
        # an outer bucket attends to keys of another rank, which are in transit while the inner buckets are computed:
        # each has its own call, with three buckets of keys
        outer = min(n_buckets, self.neighbours)
        # for ranks between two others, or for the first of two
        before = w if outer == 2 else 0
        inner = Band((n_buckets - outer) * w, self.padded, w, before, sizes)
        return (inner, *(Band(w, 3 * w, w, w, sizes) for _ in range(outer)))

    @property
    def bands_at_the_end(self) -> tuple[Band, ...]:
        """Calls of the last rank under nodes, whose last bucket may be short."""
        if not self.neighbours:
            return self.bands
        w, rest = self.decoder.window, -self.decoder.anchors % self.decoder.window
        sizes = run_sizes(w, launched=self.launched)
        return (Band(max(self.padded - w - rest, 0), self.padded - rest, w, w, sizes),)

    @property
    def kernel_calls(self) -> tuple[KernelCalls, ...]:
        """Calls of torch's attention kernels: all anchors; under nodes one set per band."""
        return tuple(map(calls_of, self.bands))

    @property
    def sparse_columns(self) -> int:
        """Columns of a sparse likelihood that are computed at a time."""
        return sparse_columns(self.block, launched=self.launched)

    @property
    def launched(self) -> bool:
        """Whether the device is an accelerator, which launches kernels; False for a CPU."""
        return self.decoder.launched

    @property
    def side_by_side(self) -> int:
        """Number of strata that run at the same time.

        It is 1 if ranks compute each stratum together, which requires one order, or with torch.compile, whose settings
        are global.
        """
        alone = self.axes.placement in ("replicated", "strata") and not self.by_features
        alone = alone and self.axes.kernels == "eager"
        if not (self.streamed and alone):
            return 1
        return strata_side_by_side(self.decoder.threads, anchors=self.anchors, dim=self.decoder.dim)


def widest(dim: int, ranks: int) -> int:
    """Return d, the channels of the rank that has most; pairs of channels stay together if D is even."""
    return 2 * -(-dim // (2 * ranks)) if dim % 2 == 0 else -(-dim // ranks)


Sizes = TypeVar("Sizes", bound=RankSizes)
Counted = TypeVar("Counted")
KEPT = 32
"""Number of decoders whose terms are cached: for time and memory, and for every length of the model axis."""


class Term(Generic[Sizes, Counted]):
    """A number that a model counts for a stratum.

    Args:
        count: Function of the sizes of the stratum.
        reads: Axes of a plan that `count` reads.
        of_features: Whether it depends on the stratum's features; if not, all strata with a key share one value, and so
            do all without.
    """

    def __init__(self, count: Callable[[Sizes], Counted], *reads: str, of_features: bool = True) -> None:
        self.count, self.reads, self.of_features = count, reads, of_features


class Strata(Generic[Sizes]):
    """All strata of a decoder on one rank, with a cache of their terms.

    Args:
        kind: Type of the sizes that terms are counted from.
        sizes: The other fields of `kind`: cells, ranks, bytes per element, rates.
    """

    def __init__(self, kind: type[Sizes], decoder: DecoderShape, **sizes: Any) -> None:
        self._kind, self._decoder, self._sizes = kind, decoder, sizes
        self._found: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def column(self, term: Term[Sizes, Counted], axes: Axes) -> tuple[Counted, ...]:
        """Return a term of every stratum, under the choices of a plan."""
        seen = {axis: getattr(axes, axis) for axis in term.reads}
        if seen.get("placement") == "strata":
            # under strata parallelism a rank computes a stratum as a single device does, so both share cached terms
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
        # without its features a stratum differs from others only in whether it makes a key, so one of each kind is
        # counted
        alike = {keyed: count(k) for keyed, k in {k > 0: n for n, k in enumerate(distances)}.items()}
        return tuple(alike[k > 0] for k in distances)


same_strata = lru_cache(maxsize=KEPT)(Strata)


def strata_of(kind: type[Sizes], decoder: DecoderShape, axes: Axes, *, ranks: int, **sizes: Any) -> Strata[Sizes]:
    """Return the strata of a decoder under the choices of a plan; the same sizes return the same cached object."""
    # a decoder that is not sharded has the same terms for every length of the model axis: one cache entry serves all
    split = axes.placement not in ("replicated", "strata") or axes.features == "sharded"
    return cast(Strata[Sizes], same_strata(cast(Any, kind), decoder, ranks=ranks if split else 1, **sizes))
