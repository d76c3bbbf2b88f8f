"""Predict peak memory from shapes: EPM(K) = M_base + sum over strata of Delta M_k (Zhang et al. 2026, Eq. 2).

The paper writes K x Delta M. Here Delta M_k is kept per stratum, because strata differ a little in their features; its
mean is the paper's Delta M (kept_tensors.py). The peak of a training step also has the tensors that a stratum allocates
and frees (temporaries.py). It is the highest of these moments:

    forward pass     M_base, strata before k, the most that stratum k holds
                     M_base, all strata, other decoders
    backward pass    the same without the last step's gradients, the most that stratum k holds in its backward pass
    at its end       M_base, and the gradients of the strata's inputs, or those of the sampled edges' ends

M_base is weights, optimiser state, the last step's gradients and base activations. The optimiser step holds less.

If a CPU runs streamed strata concurrently, each of the others counts with its own peak. This is an upper bound, because
their peaks need not coincide.

Known limits: bytes of one rank, the widest under S5 and the first under S2, which may be two ranks if sizes do not
divide; S3 of a plan file with the usual number of queries in a chunk; the allocator's overhead is not counted; under
nodes, vertices that are no anchors, and edges, are assumed to be split evenly, and ghosts are left out. Legend:
planning/sizes.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.planning.base.base_plan import shape_with
from lightning_amp.planning.memory.kept_tensors import latent_terms, table_numbers
from lightning_amp.planning.memory.temporaries import CELLS, KEY, MAKING, backward_peak, forward_peak
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.sizes import Counted, RankSizes, Term, strata_of, widest
from lightning_amp.planning.time.step_seconds import strata_ends
from lightning_amp.techniques.hic.rows import AGAIN, RETAINED, STREAMED

INDEX_BYTES = 8
"""Bytes of the int64 index of an anchor, a vertex or one end of an edge."""
FEATURES: Term[RankSizes, int] = Term(lambda s: s.most_features, "placement", "features")


@dataclass(frozen=True, kw_only=True, slots=True)
class StratumBytes:
    """Bytes of one stratum on the rank that runs it.

    Attributes:
        left: Bytes of it that remain when the next stratum starts: Delta M_k.
        spine: In a chained decoder, bytes of other strata's spine that are kept while it runs.
        alive: Bytes of it right after its forward pass.
        forward: Peak of its forward pass, including what is alive after it.
        backward: Peak of its backward pass.
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
        runs: Strata of every rank: one run, or several under strata parallelism.
        activations: How activations of a stratum are kept: RETAINED, AGAIN or STREAMED.
        other_decoder_bytes: Peak of the decoders that run after the strata.
        gradient_bytes: Gradients of the last step, which are freed when the backward pass starts.
        entered_bytes: Gradients of the strata's inputs; stream allocates them before the first stratum.
        beside_bytes: Peak of other strata that run concurrently.
        region_bytes: Peak of the gradients of the strata's inputs at the end of the backward pass.
        edge_bytes: Temporaries of the graph's backward pass, when the strata's bytes are freed.
        summed_bytes: Under recompute, the gradients of u and v from later strata while a stratum runs again.
        tables_bytes: Tables that attention computes in the first stratum that has a key, and keeps from then on.
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
        """Mean Delta M_k, the Delta M of the paper; 0 without strata."""
        return sum(self.stratum_bytes) // max(1, len(self.stratum_bytes))

    @property
    def peak_bytes(self) -> int:
        """Peak of the step on the rank that has most."""
        before, left = self._before(), self.stratum_bytes
        # decoders after the strata are the same on all ranks, so the rank whose strata leave most has the peak
        after = max((sum(left[slice(*run)]) for run in self.runs), default=0)
        base = self.base_bytes + self.tables_bytes
        end = base + after + self.entered_bytes
        forward = [n + s.forward for n, s in zip(before, self.strata, strict=True)]
        # backward passes of strata free what they kept; under stream, gradients remain until the outer backward pass
        strata_done = end if self.activations == STREAMED else base
        return max(
            end + self.other_decoder_bytes,
            max(forward, default=0) + self.beside_bytes,
            max(self._backward(before), default=0) + self.beside_bytes,
            # gradients that stream allocated in advance are part of those at the region's entry: not counted twice
            strata_done + self.region_bytes - self.entered_bytes,
            # the backward pass of the graph's encoder comes last
            base + self.edge_bytes,
        )

    def _backward(self, before: list[int]) -> list[int]:
        """Peaks of the strata's backward passes, after `zero_grad` has freed the last step's gradients."""
        if self.activations == STREAMED:
            # these run inside the loss, before `zero_grad`: the last step's gradients may still exist
            return [n + s.backward for n, s in zip(before, self.strata, strict=True)]
        if self.activations == AGAIN:
            # outputs of chained strata are kept, except the last one's, which has no reader
            left = self.stratum_bytes
            kept = [sum(left[start : stop - 1]) for start, stop in self.runs for _ in range(start, stop)]
            whole = [self.base_bytes + self.tables_bytes + self.summed_bytes + n for n in kept]
            # the forward pass runs again, after the last step's gradients were freed
            again = [max(s.forward, s.backward) for s in self.strata]
            return [n + m - self.gradient_bytes for n, m in zip(whole, again, strict=True)]
        return [n + s.backward - self.gradient_bytes for n, s in zip(before, self.strata, strict=True)]

    def _before(self) -> list[int]:
        """Bytes of everything else when a stratum starts."""
        found, every = [], self.stratum_bytes
        for run in self.runs:
            # only strata of the same rank: other ranks have their own memory
            left = every[slice(*run)]
            if self.activations == STREAMED:
                # memory of all gradients is allocated before the first stratum
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
        ends: Under strata parallelism, the end of each rank's range of strata; empty for ranks of equal speed.

    Raises:
        PlanError: `shape_after` of a registered strategy did not return a shape.
    """
    chosen = tuple(strategies)
    shape = shape_with(shape, chosen, model_ranks)
    return estimate(shape, axes or Axes.of(chosen), model_ranks=model_ranks, wide_layers="S2" in chosen, ends=ends)


def estimate(
    shape: ModelShape, axes: Axes, *, model_ranks: int = 1, wide_layers: bool = False, ends: tuple[int, ...] = ()
) -> Estimate:
    """Predict the memory of a training step on one rank; registered strategies need `predict`.

    Args:
        shape: The model, with the cells of one rank's batch.
        wide_layers: Whether S2 shards the wide layers but not the decoder's features.
        ends: As in `predict`.
    """
    # sizes of the first stratum, for values that all strata share
    sizes = RankSizes(
        decoder=shape.decoder, axes=axes, k=0, cells=shape.batch_size, ranks=model_ranks, element=shape.element_bytes
    )
    entered, region = _region(shape, sizes)
    runs = _runs(shape, sizes, ends)
    parameters, buffers, inputs = shape.parameter_bytes, shape.buffer_bytes, shape.base_activation_bytes
    if (vertices := shape.vertices) is not None and sizes.by_nodes:
        # vertices of other ranks have no embedding, gradient or state here; the map of rows to ranks, and the rank's
        # own edges, come in addition to the lists of all
        own = sizes.anchors + -(-max(0, vertices.count - sizes.decoder.anchors) // sizes.ranks)
        away, per_edge = vertices.count - own, 2 * INDEX_BYTES + shape.element_bytes
        parameters -= shape.element_bytes * sizes.decoder.dim * away
        inputs -= shape.vertex_bytes * away // vertices.count
        buffers += INDEX_BYTES * (vertices.count + own) + per_edge * -(-vertices.edges // sizes.ranks)
    if axes.features == "sharded" or wide_layers:
        # a rank has a shard of these layers' weights, and keeps its columns of their inputs
        parameters -= shape.wide_weight_bytes - -(-shape.wide_weight_bytes // model_ranks)
        inputs -= shape.wide_input_bytes - -(-shape.wide_input_bytes // model_ranks)
    if axes.features == "sharded" or axes.placement == "nodes":
        # the anchors of the rank's own features, in addition to the list of all
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
        # stream allocates the gradients of u and v before the first stratum, and adds to them in place
        entered_bytes=sum(latent_terms(sizes).values()) if sizes.streamed else 0,
        beside_bytes=_beside(sizes, found),
        region_bytes=region,
        edge_bytes=shape.edge_bytes,
        summed_bytes=sum(latent_terms(sizes).values()) if sizes.recomputed else 0,
        tables_bytes=shape.element_bytes * table_numbers(sizes),
        # chained strata that are streamed run from the last one to the first
        tables_from=0 if shape.decoder.chained and sizes.streamed else first_key,
    )


def _column(term: Term[RankSizes, Counted], s: RankSizes) -> tuple[Counted, ...]:
    strata = strata_of(RankSizes, s.decoder, s.axes, ranks=s.ranks, cells=s.cells, element=s.element)
    return strata.column(term, s.axes)


def _beside(s: RankSizes, found: tuple[StratumBytes, ...]) -> int:
    """Peak of the strata that run concurrently with one, and the gradients of one that waits to be added."""
    if s.side_by_side == 1:
        return 0
    waiting = s.element * (s.latents * (1 + s.decoder.chained) + s.cells * s.width) + max(n.left for n in found)
    return (s.side_by_side - 1) * max(max(n.forward, n.backward) for n in found) + waiting


def _spines(s: RankSizes, runs: tuple[tuple[int, int], ...]) -> list[int]:
    """Bytes of other strata's rows of a chained decoder's spine that are kept while each stratum runs."""
    distances = s.decoder.distances
    if not s.decoder.chained:
        return [0] * len(distances)
    row = s.element * s.latents
    if not s.streamed:
        # for strata before a rank's own: the anchors, normalised and projected
        return [row * 2 * sum(k > 0 for k in distances[:start]) for start, stop in runs for _ in range(start, stop)]
    # every step-th row of the spine is kept, and the rows of one segment while its strata run (stream.py)
    step, same = isqrt(len(distances) - 1) + 1, 1 - s.keyed
    # the first kept row, also of a segment, is v itself if a stratum has no key, and is not counted
    waiting = [k // step + k % step if k >= step else max(0, k - same) for k in range(len(distances))]
    # the gradient passed to the previous stratum, which the last stratum of a run does not get
    last = {stop - 1 for _, stop in runs}
    return [row * (n + (k not in last)) for k, n in enumerate(waiting)]


def _strata(s: RankSizes, runs: tuple[tuple[int, int], ...]) -> tuple[StratumBytes, ...]:
    found, columns = [], (_column(KEY, s), _column(MAKING, s), _column(CELLS, s), _spines(s, runs))
    for key, making, cells, spine in zip(*columns, strict=True):
        alive = kept = key.kept + making.kept + cells.kept
        left = kept
        if s.recomputed:
            # only the stratum's output is kept
            alive = left = making.left
        elif s.streamed:
            # its gradients are kept
            left = making.left + cells.tables
            alive = making.alive + cells.tables if cells.there_and_back else kept
        forward, backward = forward_peak(key, making, cells), backward_peak(key, making, cells)
        found.append(StratumBytes(left=left, spine=spine, alive=alive, forward=forward, backward=backward))
    return tuple(found)


def _runs(shape: ModelShape, s: RankSizes, ends: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the range of strata of every rank under strata parallelism; else one range with all strata."""
    strata = len(s.decoder.features)
    if s.axes.placement != "strata":
        return ((0, strata),)
    # ends of a given plan may be those of another decoder; installing that plan raises an error
    usable = len(ends) == s.ranks and list(ends) == sorted({*ends}) and ends[0] > 0 and ends[-1] == strata
    return tuple(pairwise((0, *(ends if usable else strata_ends(shape, s.axes, ranks=s.ranks)))))


def _region(shape: ModelShape, sizes: RankSizes) -> tuple[int, int]:
    """Bytes of copies of u and v [N + B, d] at the strata's entry, and the peak of their gradients at the end.

    techniques/ranks/sharded_region.py defines which gradients are gathered or summed there.
    """
    decoder, axes = sizes.decoder, sizes.axes
    rows = shape.element_bytes * (decoder.anchors + shape.batch_size)
    if axes.placement.startswith("hidden"):
        own = rows * widest(decoder.dim, sizes.ranks)
        # the gradients replace the copies, are gathered as [R, N + B, d], and concatenated
        return own, 2 * sizes.ranks * own
    if axes.placement == "nodes" and shape.vertices is not None:
        # the gradient of v has only own rows, and is passed on unchanged
        return 0, shape.element_bytes * decoder.dim * (sizes.anchors + 3 * shape.batch_size)
    # under S2 concatenated and summed, in copies
    summed = axes.features == "sharded" or axes.placement in ("strata", "nodes")
    return 0, rows * decoder.dim * (3 if summed else 1)
