"""The memory model: EPM(K) = M_base + sum over strata of Delta M_k, from shapes alone (Zhang et al. 2026, Eq. 2).

The paper writes K x Delta M; strata differ a little in their features, so Delta M_k is kept per stratum here and its
mean is what the paper calls Delta M (kept_tensors.py). What stands between that and the peak of a training step are
the tensors that a stratum makes and drops (temporaries.py). The peak is the highest of these moments:

    forward pass     M_base, strata before k, the most that stratum k holds
                     M_base, all strata, other decoders
    backward pass    the same without the last step's gradients, the most that stratum k holds in its backward pass
    at its end       M_base, and the gradients of what enters the strata, or those of the sampled edges' ends

M_base is weights, optimiser state, the last step's gradients and base activations. The optimiser step holds less.

Where a CPU runs streamed strata side by side, others exist with each one at their most: an upper bound, for their
highest moments need not meet.

Known limits: bytes of one rank, the widest under S5 and the first under S2, which may be two where sizes do not
divide; S3 with the usual number of buckets in a chunk; what an allocator adds is not counted; of the graph's vertices
under nodes, those that are no anchors, and edges, are taken as split evenly, and ghosts are left out.
Legend: planning/sizes.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.errors import PlanError
from lightning_amp.planning.memory.kept_tensors import latent_terms, table_numbers
from lightning_amp.planning.memory.temporaries import CELLS, KEY, MAKING, backward_peak, forward_peak
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.sizes import Counted, RankSizes, Term, strata_of, widest
from lightning_amp.planning.time.step_seconds import strata_ends
from lightning_amp.techniques.hic.rows import AGAIN, RETAINED, STREAMED
from lightning_amp.techniques.table import STRATEGIES

INDEX_BYTES = 8
"""Of an anchor, a vertex or one end of an edge, int64."""
FEATURES: Term[RankSizes, int] = Term(lambda s: s.most_features, "placement", "features")


@dataclass(frozen=True, kw_only=True, slots=True)
class StratumBytes:
    """Bytes of one stratum on the rank that runs it.

    Attributes:
        left: What there is of it when the next one starts: Delta M_k.
        spine: What is kept of other strata's spine, in a chained decoder, when it runs.
        alive: What there is of it right after its forward pass.
        forward: The most that it holds in its forward pass, with what is alive after it.
    """

    left: int
    spine: int
    alive: int
    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted bytes of one rank.

    Attributes:
        base_bytes: M_base: weights, optimiser state, gradients and base activations.
        runs: Strata of every rank: one run, or under strata parallelism several.
        activations: What is kept of a stratum: RETAINED, AGAIN or STREAMED.
        other_decoder_bytes: The most that the decoders hold which come after the strata.
        gradient_bytes: The last step's gradients, which are gone when the backward pass starts.
        entered_bytes: Gradients of what enters the strata, whose memory under stream is there from the first one on.
        beside_bytes: What other strata hold at most that run at the same time.
        region_bytes: The most that these take at the end of the backward pass.
        edge_bytes: Temporaries of the graph's backward pass, when the strata are gone again.
        summed_bytes: Under recompute the gradients of u and v from later strata, while a stratum runs again.
        tables_bytes: What attention makes in the first stratum that has a key, and keeps from then on.
    """

    base_bytes: int
    strata: tuple[StratumBytes, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    activations: str = RETAINED
    other_decoder_bytes: int
    gradient_bytes: int
    entered_bytes: int = 0
    beside_bytes: int = 0
    region_bytes: int
    edge_bytes: int
    summed_bytes: int = 0
    tables_bytes: int = 0
    tables_from: int = 0

    @property
    def stratum_bytes(self) -> tuple[int, ...]:
        """Delta M_k of every stratum."""
        return tuple(s.left for s in self.strata)

    @property
    def strata_bytes(self) -> tuple[int, ...]:
        """Bytes held right after every stratum of the forward pass, on the rank that runs it."""
        return tuple(n + self.strata[k].alive for k, n in enumerate(self._before()))

    @property
    def mean_stratum_bytes(self) -> int:
        """What the paper calls Delta M; 0 without strata."""
        return sum(self.stratum_bytes) // max(1, len(self.stratum_bytes))

    @property
    def peak_bytes(self) -> int:
        """Peak of the step, of the rank that has most."""
        before, left = self._before(), self.stratum_bytes
        # what comes after the strata is the same on all ranks, so that the one whose strata leave most is the highest
        after = max((sum(left[slice(*run)]) for run in self.runs), default=0)
        base = self.base_bytes + self.tables_bytes
        end = base + after + self.entered_bytes
        forward = [n + s.forward for n, s in zip(before, self.strata, strict=True)]
        # what strata keep is freed by their backward passes; under stream they leave gradients, until the outer one
        strata_done = end if self.activations == STREAMED else base
        return max(
            end + self.other_decoder_bytes,
            max(forward, default=0) + self.beside_bytes,
            max(self._backward(before), default=0) + self.beside_bytes,
            # the gradients that stream has made room for are among those at the region's entry: not counted twice
            strata_done + self.region_bytes - self.entered_bytes,
            # the backward pass of the graph's encoder comes last
            base + self.edge_bytes,
        )

    def _backward(self, before: list[int]) -> list[int]:
        """Peaks of the strata's backward passes, after `zero_grad` has dropped the last step's gradients."""
        if self.activations == STREAMED:
            # inside the loss, before `zero_grad`: the last step's gradients may still be there
            return [n + s.backward for n, s in zip(before, self.strata, strict=True)]
        if self.activations == AGAIN:
            # what chained strata hand on is kept, but for the last one's, which nothing reads
            left = self.stratum_bytes
            kept = [sum(left[start : stop - 1]) for start, stop in self.runs for _ in range(start, stop)]
            whole = [self.base_bytes + self.tables_bytes + self.summed_bytes + n for n in kept]
            # the forward pass is run again, when the last step's gradients are gone too
            again = [max(s.forward, s.backward) for s in self.strata]
            return [n + m - self.gradient_bytes for n, m in zip(whole, again, strict=True)]
        return [n + s.backward - self.gradient_bytes for n, s in zip(before, self.strata, strict=True)]

    def _before(self) -> list[int]:
        """Bytes held by others when a stratum starts."""
        found, every = [], self.stratum_bytes
        for run in self.runs:
            # a rank's strata only: those of other ranks are in other memories
            left = every[slice(*run)]
            if self.activations == STREAMED:
                # the memory of all gradients is there before the first stratum
                before = [self.base_bytes + self.entered_bytes + sum(left)] * len(left)
            else:
                before = list(accumulate(left, initial=self.base_bytes))[:-1]
            spines = (s.spine for s in self.strata[slice(*run)])
            tables = (self.tables_bytes * (k >= self.tables_from) for k in range(*run))
            found += [sum(held) for held in zip(before, spines, tables, strict=True)]
        return found


def predict(
    shape: ModelShape,
    strategies: Iterable[str],
    *,
    model_ranks: int = 1,
    axes: Axes | None = None,
    ends: tuple[int, ...] = (),
) -> Estimate:
    """Predict the memory of a training step on one rank.

    Args:
        shape: The model, with the cells of one rank's batch.
        model_ranks: R.
        axes: The decoder's choices; None for those of the strategies' usual rules.
        ends: One past the last stratum of every rank under strata parallelism; none: as ranks of one speed have them.

    Raises:
        PlanError: `shape_after` of a strategy from outside returned something else than a shape.
    """
    chosen = tuple(strategies)
    for strategy in chosen:
        after = STRATEGIES[strategy].shape_after
        shape = shape if after is None else after(shape, model_ranks)
        if not isinstance(shape, ModelShape):
            raise PlanError(
                f"shape_after of {strategy} returned {shape!r}; allowed is a ModelShape: return"
                " dataclasses.replace(shape, ...) with the sizes that it changes"
            )
    return estimate(shape, axes or Axes.of(chosen), model_ranks=model_ranks, wide_layers="S2" in chosen, ends=ends)


def estimate(
    shape: ModelShape, axes: Axes, *, model_ranks: int = 1, wide_layers: bool = False, ends: tuple[int, ...] = ()
) -> Estimate:
    """Predict the memory of a training step on one rank; `predict` knows strategies from outside too.

    Args:
        shape: The model, with the cells of one rank's batch.
        wide_layers: Whether S2 splits the wide layers where it leaves the decoder's features as they are.
        ends: As of `predict`.
    """
    # of the first stratum, for all that the strata share
    sizes = RankSizes(
        decoder=shape.decoder, axes=axes, k=0, cells=shape.batch_size, ranks=model_ranks, element=shape.element_bytes
    )
    entered, region = _region(shape, sizes)
    runs = _runs(shape, sizes, ends)
    parameters, buffers, inputs = shape.parameter_bytes, shape.buffer_bytes, shape.base_activation_bytes
    if (vertices := shape.vertices) is not None and sizes.by_nodes:
        # of the rows of other ranks there are no embedding, gradient and state, and nothing is kept; which rows are
        # where, and the rank's own edges, are there besides the lists of all
        own = sizes.anchors + -(-max(0, vertices.count - sizes.decoder.anchors) // sizes.ranks)
        away, per_edge = vertices.count - own, 2 * INDEX_BYTES + shape.element_bytes
        parameters -= shape.element_bytes * sizes.decoder.dim * away
        inputs -= shape.vertex_bytes * away // vertices.count
        buffers += INDEX_BYTES * (vertices.count + own) + per_edge * -(-vertices.edges // sizes.ranks)
    if axes.features == "sharded" or wide_layers:
        # a rank has its shard of their weights, and keeps its columns of their inputs
        parameters -= shape.wide_weight_bytes - -(-shape.wide_weight_bytes // model_ranks)
        inputs -= shape.wide_input_bytes - -(-shape.wide_input_bytes // model_ranks)
    if axes.features == "sharded" or axes.placement == "nodes":
        # the anchors of the rank's own features, besides the list of all
        buffers += INDEX_BYTES * sum(_column(FEATURES, sizes))
    found = _strata(sizes, runs)
    first_key = next((k for k, distance in enumerate(shape.decoder.distances) if distance), 0)
    return Estimate(
        # weights and the last step's gradients, then the optimiser's copies
        base_bytes=buffers + parameters * (2 + shape.optimizer_slots) + inputs + entered,
        strata=found,
        runs=runs,
        activations=axes.activations,
        other_decoder_bytes=shape.other_decoder_bytes,
        gradient_bytes=parameters,
        # stream makes room for the gradients of u and v before the first stratum, and adds to them in place
        entered_bytes=sum(latent_terms(sizes).values()) if sizes.streamed else 0,
        beside_bytes=_beside(sizes, found),
        region_bytes=region,
        edge_bytes=shape.edge_bytes,
        summed_bytes=sum(latent_terms(sizes).values()) if sizes.recomputed else 0,
        tables_bytes=shape.element_bytes * table_numbers(sizes),
        # chained strata that are streamed run from the last one on
        tables_from=0 if shape.decoder.chained and sizes.streamed else first_key,
    )


def _column(term: Term[RankSizes, Counted], s: RankSizes) -> tuple[Counted, ...]:
    strata = strata_of(RankSizes, s.decoder, s.axes, ranks=s.ranks, cells=s.cells, element=s.element)
    return strata.column(term, s.axes)


def _beside(s: RankSizes, found: tuple[StratumBytes, ...]) -> int:
    """What strata hold besides one: the most of the others, and the gradients of one that waits to be added."""
    if s.side_by_side == 1:
        return 0
    waiting = s.element * (s.latents * (1 + s.decoder.chained) + s.cells * s.width) + max(n.left for n in found)
    return (s.side_by_side - 1) * max(max(n.forward, n.backward) for n in found) + waiting


def _spines(s: RankSizes, runs: tuple[tuple[int, int], ...]) -> list[int]:
    """What is kept, in bytes, of other strata's rows of a chained decoder's spine when a stratum runs."""
    distances = s.decoder.distances
    if not s.decoder.chained:
        return [0] * len(distances)
    row = s.element * s.latents
    if not s.streamed:
        # of those before a rank's own strata the anchors, normalised and projected
        return [row * 2 * sum(k > 0 for k in distances[:start]) for start, stop in runs for _ in range(start, stop)]
    # every step-th row of the spine is kept, and those of one part while its strata run (stream.py)
    step, same = isqrt(len(distances) - 1) + 1, 1 - s.keyed
    # the first of the rows that are kept, and of its part, is v itself, which a stratum without a key hands on
    waiting = [k // step + k % step if k >= step else max(0, k - same) for k in range(len(distances))]
    # and the gradient that is handed down, which the last stratum of a run does not get
    last = {stop - 1 for _, stop in runs}
    return [row * (n + (k not in last)) for k, n in enumerate(waiting)]


def _strata(s: RankSizes, runs: tuple[tuple[int, int], ...]) -> tuple[StratumBytes, ...]:
    found, columns = [], (_column(KEY, s), _column(MAKING, s), _column(CELLS, s), _spines(s, runs))
    for key, making, cells, spine in zip(*columns, strict=True):
        alive = kept = key.kept + making.kept + cells.kept
        left = kept
        if s.recomputed:
            # all of a stratum is dropped but what it hands on
            alive = left = making.left
        elif s.streamed:
            # its gradients are left
            left = making.left + cells.tables
            alive = making.alive + cells.tables if cells.there_and_back else kept
        forward, backward = forward_peak(key, making, cells), backward_peak(key, making, cells)
        found.append(StratumBytes(left=left, spine=spine, alive=alive, forward=forward, backward=backward))
    return tuple(found)


def _runs(shape: ModelShape, s: RankSizes, ends: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The strata of every rank, where ranks have their own strata; else all of them."""
    strata = len(s.decoder.features)
    if s.axes.placement != "strata":
        return ((0, strata),)
    # those of a given plan may be of another decoder, which is refused where they are installed
    usable = len(ends) == s.ranks and list(ends) == sorted({*ends}) and ends[0] > 0 and ends[-1] == strata
    return tuple(pairwise((0, *(ends if usable else strata_ends(shape, s.axes, ranks=s.ranks)))))


def _region(shape: ModelShape, sizes: RankSizes) -> tuple[int, int]:
    """Copies of u and v [N + B, d] that enter the strata, and the most that their gradients take on the way out.

    Which gradients are gathered or summed there: techniques/ranks/sharded_region.py.
    """
    decoder, axes = sizes.decoder, sizes.axes
    rows = shape.element_bytes * (decoder.anchors + shape.batch_size)
    if axes.placement.startswith("hidden"):
        own = rows * widest(decoder.dim, sizes.ranks)
        # the gradients take the place of the copies, are gathered as [R, N + B, d], and joined
        return own, 2 * sizes.ranks * own
    if axes.placement == "nodes" and shape.vertices is not None:
        # v's gradient is that of the own rows, and goes on as it is
        return 0, shape.element_bytes * decoder.dim * (sizes.anchors + 3 * shape.batch_size)
    # under S2 joined and summed, in copies
    summed = axes.features == "sharded" or axes.placement in ("strata", "nodes")
    return 0, rows * decoder.dim * (3 if summed else 1)
