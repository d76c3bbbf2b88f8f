"""Compute the peak bytes of one stratum on one rank, in its forward and its backward pass.

Each candidate moment counts everything that the stratum holds then, including its kept tensors, and nothing of other
strata. Which moment is the highest depends on the shape: with many cells the likelihood; with wide windows attention;
with many ranks under S5 the products of the feed-forward layer, which have all output channels. Moments that are never
the highest are left out: the backward pass of decode, and the forward pass of attention that the backward pass
recomputes. Legend: planning/sizes.py.
"""

from typing import NamedTuple

from lightning_amp.planning.memory.kept_tensors import (
    attention_terms,
    block_terms,
    keeps_val,
    key_terms,
    latent_terms,
    likelihood_terms,
    made_of_terms,
    statistic_terms,
    table_terms,
)
from lightning_amp.planning.sizes import RankSizes, Term
from lightning_amp.techniques.hic.attention.bucket_runs import Band, BucketRun, KernelCalls


class KeyBytes(NamedTuple):
    """Bytes of the key that depend on the stratum's features."""

    kept: int
    decoding: int


class KeyMakingBytes(NamedTuple):
    """Bytes of computing the key.

    Attributes:
        kept: Bytes kept, without the key.
        dropped: Bytes freed once the key is computed: val; under `gather` the own shard of qk; in torch's kernels all
            of qk.
        feed_forward: Temporaries of the feed-forward layer.
        attention: All bytes during attention; 0 if that moment is never the highest.
        feed_forward_back: Temporaries of the backward pass of the feed-forward layer, None without attention.
        back: All bytes during the backward pass of attention, or of a convolution.
        left: Bytes of the block that remain when the next stratum starts, if not everything is kept.
        alive: Bytes after the backward pass of the cells, without the key and the tables.
    """

    kept: int
    left: int
    alive: int
    dropped: int = 0
    feed_forward: int = 0
    attention: int = 0
    feed_forward_back: int | None = None
    back: int = 0


class CellBytes(NamedTuple):
    """Bytes of all cells from the key to the loss; several blocks run forward and backward one after the other.

    Attributes:
        kept: Bytes kept for the backward pass, of one block.
        forward: Peak of the forward pass.
        backward: Peak of the backward pass, 0 with several blocks.
        tables: Under stream, gradients of the tables that exist before the backward pass of the key.
        there_and_back: Whether the stratum's forward pass includes the backward pass of its cells.
    """

    kept: int
    forward: int
    backward: int
    tables: int = 0
    there_and_back: bool = False


def forward_peak(key: KeyBytes, making: KeyMakingBytes, cells: CellBytes) -> int:
    """Return the peak of a stratum's forward pass."""
    made = key.kept + making.kept
    # feed-forward, decode and likelihood run one after the other, so the highest of them counts
    while_running = max(cells.forward, making.dropped + key.decoding, making.dropped + making.feed_forward)
    return max(made + while_running, making.attention)


def backward_peak(key: KeyBytes, making: KeyMakingBytes, cells: CellBytes) -> int:
    """Return the peak of a stratum's backward pass; several blocks of cells have had theirs before."""
    made = key.kept + making.kept
    # attention's backward pass follows that of the feed-forward layer, whose kept tensors are freed by then
    of_key = making.back
    if making.feed_forward_back is not None:
        of_key = max(of_key, made + making.feed_forward_back)
    return max(cells.tables + of_key, made + cells.backward if cells.backward else 0)


def _key(s: RankSizes) -> KeyBytes:
    # scores before they are reduced: without S4 those of all anchors; in copies if each is sent to its owner
    everything = s.block * s.anchors if s.axes.decode == "full" else 0
    decoding = everything + (3 if s.hidden and s.by_features else 1) * s.block * s.most_decoded
    return KeyBytes(sum(key_terms(s).values()), s.element * decoding)


def _making(s: RankSizes) -> KeyMakingBytes:
    kept = sum(made_of_terms(s).values())
    # without stream: v, the input of the next stratum of a chained decoder
    passed_on = s.element * s.latents if s.decoder.chained and s.keyed else 0
    left = sum(block_terms(s).values()) if s.streamed else passed_on
    alive = kept + sum(latent_terms(s).values())
    if not s.attends:
        # bytes of a convolution; without a key block only the key's gradient
        return KeyMakingBytes(kept, left, alive, back=s.element * (4 if s.keyed else s.streamed) * s.latents)
    # the gated value; or the products of gate and value [R, N, 2 d], before GELU and key exist, and on a CPU, where a
    # reduce-scatter of gloo receives as much as it sends, those of the other ranks
    products = (2 if s.launched else 4) * s.partial_products
    gate = max(0 if s.paper else s.latents, products - 2 * s.latents)
    # three gradients [N, d] instead of the key; or those of gate and value from all ranks [R, N, 2 d] and their
    # products with the weights [R, N, d], after key, GELU, gate and value were freed
    gate_back = max(2 * s.latents, 3 * s.partial_products - 3 * s.latents)
    statistics = sum(statistic_terms(s).values())
    return KeyMakingBytes(
        kept,
        left,
        alive,
        dropped=s.element * _dropped(s) * s.latents,
        feed_forward=s.element * gate,
        # the backward pass recomputes chunks, and holds more
        attention=0 if s.axes.attention == "chunked" else statistics + _attending(s),
        feed_forward_back=s.element * gate_back,
        back=statistics + _attending_back(s),
    )


def _dropped(s: RankSizes) -> int:
    """Number of tensors [N, d] that exist until the key is computed."""
    if s.decoder.full:
        return not (s.decoder.chained or s.paper)
    return (not s.decoder.chained) + s.gathered + s.in_kernels


def _cells(s: RankSizes) -> CellBytes:
    kept = sum(likelihood_terms(s).values())
    forward, backward = kept + s.element * _passing(s), kept + s.element * _passing_back(s)
    if not s.streamed:
        return CellBytes(kept, forward, backward)
    tables = sum(table_terms(s).values())
    if s.blocks == 1:
        return CellBytes(kept, forward, backward, tables)
    # gradients of the tables, and of the key: the block's gradient and the sum so far
    keys = s.element * s.latents
    there_and_back = tables + max(forward + keys, backward, 2 * keys)
    return CellBytes(kept, there_and_back, 0, tables, there_and_back=True)


RING = 7
"""Tensors [n, D] in a step of the ring: keys and values, resident and in transit, and the results of a block."""

KEY = Term(_key, "placement", "features", "decode", "activations")
MAKING = Term(_making, "placement", "attention", "activations", of_features=False)
CELLS = Term(_cells, "placement", "features", "likelihood", "activations")


def _passing(s: RankSizes) -> int:
    """Temporaries of the sum of log-probabilities."""
    one = s.decoder.n_batches == 1
    if s.sparse:
        # temporaries of the nonzero counts, assumed to be one in 20, and of the columns that are computed at a time
        # (sparse_likelihood.py)
        entries, chunk = 15 * s.block_scores // 20, s.block * min(s.most_features, s.sparse_columns)
        return (7 if one else 14) * s.block_scores // 4 + entries + (3 if one else 6) * chunk
    return (5 if one else 7) * s.block_scores


def _passing_back(s: RankSizes) -> int:
    """Gradients in the backward pass of the likelihood."""
    one = s.decoder.n_batches == 1
    if s.sparse:
        return (2 if one else 3) * s.block_scores
    return (7 if one else 6) * s.block_scores


def _attending(s: RankSizes) -> int:
    """Bytes of attention with its inputs and outputs, at its last chunk."""
    p, w, a, r = s.padded, s.decoder.window, s.attended, s.queries
    inputs = 3 * s.latents
    if s.decoder.full:
        return sum(attention_terms(s).values()) + s.element * (inputs + RING * s.latents * s.by_nodes)
    if s.fused:
        # the output
        return s.element * (inputs + (s.anchors + s.halo) * a + s.latents + s.kept_weights + _fused_work(s))
    if s.in_kernels:
        # the outputs of the calls are kept, and copied once into their order
        joined = sum(run.rows * w * a for run in s.kernel_calls if len(run.calls) > 1)
        return sum(attention_terms(s).values()) + s.element * (inputs + joined)
    # all channels, before the own ones are selected
    products = r * a if s.gathered else 0
    tensors = {
        "p, qk, val [N, d]": inputs,
        "queries, keys, values of the buckets [P, a]": 3 * p * a,
        "scores [r, 3 w], or keys while they are rotated": max(3 * r * w + products, 2 * r * a),
        "outputs [P, d]": p * s.width,
    }
    return sum(attention_terms(s).values()) + s.element * sum(tensors.values())


def _attending_back(s: RankSizes) -> int:
    """Bytes of attention's backward pass: the softmax, or the sums over chunks, whichever holds more."""
    p, w, a, r = s.padded, s.decoder.window, s.attended, s.queries
    # p, qk, and the gradients of key and val
    inputs = (4 - s.gathered - s.in_kernels) * s.latents
    if s.decoder.full:
        values = s.latents * (keeps_val(s) or (s.decoder.chained and s.streamed))
        # ring: resident keys and values, and those that arrive while a rank further on still has some; their gradients,
        # sent and arriving; the gradient of the own queries; three gradients of the block
        made = (3 if not s.by_nodes else 10 + 2 * (s.ranks > 2)) * s.latents
        return sum(attention_terms(s).values()) + s.element * (inputs + values + made)
    if s.in_kernels:
        values = s.latents * (keeps_val(s) + (s.decoder.chained and s.streamed) + s.by_nodes)
        work = max(_kernel_work_back(s, run) for run in s.kernel_calls)
        return sum(attention_terms(s).values()) + s.element * (inputs + values + work)
    if s.fused:
        # gradient of queries; values if they are not p; under a streamed chained spine the sum of their two gradients;
        # under nodes a copy of the output's gradient, which is sliced there
        values = s.latents * (s.paper + (s.decoder.chained and s.streamed) + s.by_nodes)
        return s.element * (inputs + values + s.kept_weights + _fused_work(s, back=True))
    # gradients of queries, keys and values, to which every chunk adds its share: full size from the second chunk on
    so_far = 3 * p * a if s.chunks > 1 else 0
    chunk = r * (6 * w + 6 * a) + (r * a if s.gathered else 0)
    summed = so_far + chunk + 2 * p * a
    kept = sum(attention_terms(s).values())
    # a GPU kernel of the softmax first multiplies its gradient by its result (footprint/live_bytes.py)
    product = 3 * r * w if s.launched else 0
    if s.axes.attention == "chunked":
        softmax = so_far + chunk + 3 * r * w + product
        return kept + 3 * w * w + s.element * (inputs + max(softmax, summed))
    return max(kept + s.element * (inputs + 6 * r * w + product), s.element * (inputs + summed))


def _fused_work(s: RankSizes, *, back: bool = False) -> int:
    """Bytes of fused attention besides inputs and results: rotated keys, scores and rows of a run, and tables.

    The backward pass also has the gradients of keys and values, padded to full buckets like the rotated keys.
    """
    w, a = s.decoder.window, s.attended
    # under nodes the calls run one after the other
    held = []
    for band in (*s.bands, *s.bands_at_the_end):
        before, after = band.around
        buckets = band.n_key_buckets + before + after
        scores = max((run.n_buckets * min(run.own[1], band.sizes.rows) * run.columns for run in band.runs), default=0)
        copied = max((_copied(band, run, back=back) for run in band.runs), default=0)
        rows = w * (2 * band.largest + before + after + (3 if back else 1) * buckets) + copied
        tables = 2 * (w + buckets + 1)
        held.append((1 if s.kept_weights else 2) * scores + (rows + tables) * a + w * buckets)
    return max(held)


def _kernel_work_back(s: RankSizes, run: KernelCalls) -> int:
    """Temporaries of a call's backward pass in torch's kernels, at the moment with two copies of the slots' gradients.

    Gradients of rows also exist twice, per call and in order, where those of keys and values are added to them.
    """
    grad = run.rows if s.ragged else 0
    slots = 4 * run.slots + 2 * sum(run.around) + 4
    return s.decoder.window * s.attended * (grad + 2 * run.rows + 2 * run.keys + slots)


def _copied(band: Band, run: BucketRun, *, back: bool) -> int:
    """Rows of a run that are copied and zero-padded: values, and in the backward pass the gradient of the output."""
    rows, keys = band.copies(run)
    n_keys = (run.n_buckets - 1) * band.window + run.near[1]
    return keys * n_keys + (back and rows) * run.n_buckets * run.own[1]
