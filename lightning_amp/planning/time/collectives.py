"""List the collectives of a training step over the model axis: sizes and counts per rank.

Collectives of one stratum, forward and backward (those of S5 are listed in techniques/hic/hidden.py):

    S5         scores of attention C x [p, 3 w] in all, norms, products and gradients of the Linear layers, decode
    S2         normaliser: all-gather [B] forward, all-reduce [B] backward; with S5 decode is scattered and gathered
    nodes      qk and p of w anchors to each neighbour, 4 w D, and their gradients back; the normaliser of S2; with
               full attention those of n anchors in R - 1 steps of a ring, and back with their gradients
    strata     nothing

A recomputed forward pass runs its collectives again, and so do chunks of scores under S3. With stream, decode and
normaliser run once per block of cells. Once per step:

    S5         all-gather of the gradients of u and v, (B + N) d; with S2 also its loss and its strata's weights
    S2         all-reduce of the loss; all-reduce of the gradients of u, v and the strata's weights, N D + B D + K
    strata     as S2
    nodes      the loss as in S2; all-gather of the gradients of own anchors, u and the weights, n D + B D + K
    all        gradients of parameters: partial gradients over all ranks, others over the data axis

Known limits: the strata's weights are assumed independent of the cell; copies for padding are not counted.
Legend: planning/sizes.py; C chunks of queries, K strata.
"""

from dataclasses import dataclass, replace

from lightning_amp.costs.device_rates import Kind, Links, collective_seconds
from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.sizes import RankSizes, widest


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A kind of collective over the model axis.

    Attributes:
        numbers: Elements that a rank contributes, summed over all calls.
        calls: Number of calls.
    """

    kind: Kind
    numbers: float
    calls: int = 1

    def seconds(self, ranks: int, links: Links, *, element_bytes: int = 4, inner: int = 1) -> float:
        """Return the time of all calls, from `collective_seconds`."""
        each = element_bytes * self.numbers / self.calls
        return self.calls * collective_seconds(self.kind, each, ranks, links, inner=inner)


Traffic = tuple[Collective, ...]


def stratum_traffic(s: RankSizes) -> Traffic:
    """Return all collectives of one stratum in a training step."""
    forward = backward = Traffic()
    if s.by_features or s.by_nodes:
        # collectives of the normaliser
        gathered = Collective(kind="all_gather", numbers=s.cells, calls=s.blocks)
        forward, backward = (gathered,), (replace(gathered, kind="all_reduce"),)
    if s.hidden:
        for there, back in (_hidden_key(s), _hidden_decode(s)):
            forward, backward = forward + there, backward + back
    if s.by_nodes and s.attends:
        there, back = _ring(s) if s.decoder.full else _halo(s)
        forward, backward = forward + there, backward + back
    return forward + backward + (forward if s.recomputed else ())


def region_traffic(decoder: DecoderShape, axes: Axes, *, cells: int, ranks: int) -> Traffic:
    """Return the collectives around all strata in a training step, except those of parameters."""
    if ranks == 1:
        return ()
    anchors, dim = decoder.anchors, decoder.dim
    weights = len(decoder.features)
    total = Collective(kind="all_reduce", numbers=1)
    if axes.placement == "nodes":
        own = RankSizes(decoder=decoder, axes=axes, k=0, cells=cells, ranks=ranks).anchors
        return total, Collective(kind="all_gather", numbers=(own + cells) * dim + weights)
    if axes.placement in ("hidden", "hidden-gathered"):
        entered = Collective(kind="all_gather", numbers=(cells + anchors) * widest(dim, ranks))
        if axes.features == "all":
            return (entered,)
        return total, entered, Collective(kind="all_reduce", numbers=weights)
    if axes.placement == "strata" or axes.features == "sharded":
        return total, Collective(kind="all_reduce", numbers=(cells + anchors) * dim + weights)
    return ()


def gradient_numbers(decoder: DecoderShape, axes: Axes) -> tuple[int, int]:
    """Return the numbers of strata parameters whose gradients are partial on each rank, and of all others."""
    keys, tables = decoder.strata_weights
    if axes.features == "sharded" or axes.placement in ("strata", "nodes"):
        return keys + tables, 0
    # S5 shards channels, which the tables lack: without S2 every rank computes the full gradients of the tables
    return (0, keys + tables) if axes.placement == "replicated" else (keys, tables)


def _halo(s: RankSizes) -> tuple[Traffic, Traffic]:
    rows = 2 * s.neighbours * s.decoder.window
    halo = (Collective(kind="exchange", numbers=rows * s.decoder.dim),)
    return halo, halo


def _ring(s: RankSizes) -> tuple[Traffic, Traffic]:
    steps = s.ranks - 1
    # keys and values are two tensors, sent R - 1 times in each direction; their gradients move along and need one more
    # step, to the rank that owns the rows (sharding/attention/ring.py)
    there, back = (
        (Collective(kind="exchange", numbers=calls * s.latents, calls=calls),) for calls in (2 * steps, 4 * steps + 2)
    )
    return there, back


def _hidden_decode(s: RankSizes) -> tuple[Traffic, Traffic]:
    if not s.by_features:
        return (Collective(kind="all_reduce", numbers=s.cells * s.mean_decoded, calls=s.blocks),), ()
    scattered = Collective(kind="reduce_scatter", numbers=s.ranks * s.batch_scores, calls=s.blocks)
    return (scattered,), (Collective(kind="all_gather", numbers=s.batch_scores, calls=s.blocks),)


def _hidden_key(s: RankSizes) -> tuple[Traffic, Traffic]:
    if not s.attends:
        return (), ()
    rows, norms = s.latents, 1 if s.paper else 2
    forward = [
        Collective(kind="all_gather", numbers=norms * (2 * s.anchors + 1), calls=norms),
        Collective(kind="reduce_scatter", numbers=4 * s.ranks * rows, calls=3),
    ]
    backward = [
        Collective(kind="all_reduce", numbers=norms * 2 * s.anchors, calls=norms),
        Collective(kind="all_gather", numbers=4 * rows, calls=3),
    ]
    if s.gathered:
        forward.append(Collective(kind="all_gather", numbers=2 * rows))
        backward.append(Collective(kind="reduce_scatter", numbers=2 * s.ranks * rows))
    else:
        lengths = Collective(kind="all_reduce", numbers=s.anchors)
        scores = Collective(kind="all_reduce", numbers=s.pairs, calls=s.chunks)
        forward += [lengths, scores]
        # chunks keep no scores, so their backward pass computes and sums the scores once more
        backward += [lengths, scores, *([scores] if s.axes.attention == "chunked" else [])]
    return tuple(forward), tuple(backward)
