"""Compute which bytes one stratum keeps for the backward pass on one rank, by name of the tensor.

The factors count the tensors of the reference decoder; tests compare the sums with the bytes of simulated steps.
Legend: planning/sizes.py.
"""

from lightning_amp.costs.model_shape import TABLES_PER_FEATURE
from lightning_amp.planning.sizes import RankSizes
from lightning_amp.techniques.hic.attention.bucket_runs import turned_at_once

Terms = dict[str, int]

NEIGHBOUR = {"eager": 9, "chunked": 15, "chunked-retained": 15, "fused": 9}
"""Buckets [w, a] that nodes keeps per neighbour: pieces of three buckets of queries, keys and values."""

DENSE_KEPT = {True: (9, 4), False: (15, 0)}
SPARSE_KEPT = {True: (3, 4), False: (7, 0)}
"""Tensors [B, f_k] and rows [f_k] that a likelihood keeps, with one experimental batch and with several."""


def block_terms(s: RankSizes) -> Terms:
    """Gradients of a stratum's block, which are computed before the backward pass under stream."""
    return {"gradients of a stratum's block": s.element * s.decoder.block_weights * s.keyed}


def table_terms(s: RankSizes) -> Terms:
    """Gradients of a stratum's tables."""
    whole = TABLES_PER_FEATURE * s.decoder.n_batches * s.stratum_features
    return {"gradients of the tables [n_batches, F_k]": s.element * whole}


def latent_terms(s: RankSizes) -> Terms:
    """Gradients that the backward pass of a stratum's cells leaves, without its tables."""
    return {"gradients of the key and of u [N + B, d]": s.element * (s.latents + s.cells * s.width)}


def likelihood_terms(s: RankSizes) -> Terms:
    """Tensors of one block of cells from the decoded scores to the loss."""
    # with one experimental batch a table's row is broadcast; with several, every cell has a copy of its row
    one = s.decoder.n_batches == 1
    copies, rows = SPARSE_KEPT[one] if s.sparse else DENSE_KEPT[one]
    terms = {
        "decoded scores and likelihood [B, f_k]": s.element * copies * s.block_scores,
        "rows of the tables [f_k]": s.element * rows * s.most_features,
    }
    # boolean masks, one byte per element; sparse counts need no mask
    return terms if s.sparse else terms | {"x == 0 [B, f_k]": s.block_scores}


def key_terms(s: RankSizes) -> Terms:
    """The key; with S4 also the keys of the features, if they are copies."""
    # the keys of consecutive anchors need no copy
    run = s.stratum_features >= s.decoder.anchors - s.decoder.distances[s.k]
    if s.axes.decode == "key-first" and not run:
        return {"keys of the features [F_k, d]": s.element * s.most_decoded * s.width}
    return {"key [N, d]": s.element * s.latents} if s.keyed else {}


def made_of_terms(s: RankSizes) -> Terms:
    """Tensors from which the key is computed."""
    if s.attends:
        return layer_terms(s) | statistic_terms(s) | attention_terms(s)
    return {"anchors, convolution [N, d]": s.element * 2 * s.latents} if s.keyed else {}


def layer_terms(s: RankSizes) -> Terms:
    """Norms, projections and feed-forward: p, qk, attended key, its norm, twice gate and value, GELU.

    The paper's form has no second norm. `gather` keeps the gathered qk instead, and torch's kernels only the rotated
    qk. A chained decoder keeps val, and so does attention whose values are val (`keeps_val`).
    """
    tensors = 7 - s.paper - s.gathered - s.in_kernels + (s.decoder.chained or keeps_val(s))
    return {"norms, projections, feed-forward [N, d]": s.element * tensors * s.latents}


def keeps_val(s: RankSizes) -> bool:
    """Whether attention keeps val as its values; torch's kernels copy values that do not fill buckets."""
    return s.paper and (s.decoder.full or s.fused or (s.in_kernels and not s.ragged))


def statistic_terms(s: RankSizes) -> Terms:
    """What the layers keep in addition to tensors [N, d]."""
    terms = {"means, deviations and norms [N]": s.element * _rows(s) * s.anchors}
    if s.hidden:
        terms["own columns of four square weights [D, d]"] = s.element * 4 * s.decoder.dim * s.width
    if s.gathered:
        terms["gathered keys and values [2 N, D]"] = s.element * 2 * s.anchors * s.decoder.dim
    return terms


def table_numbers(s: RankSizes) -> int:
    """Elements of attention's masks and rotation factors, which are computed once and kept for the whole process."""
    if s.in_kernels:
        return _kernel_tables(s)
    # on a CPU the tables are small: a row per position in a bucket, and one per bucket
    return _product_tables(s) if s.fused and s.launched else 0


def _kernel_tables(s: RankSizes) -> int:
    """Tables of torch's kernels: masks of the outer and inner buckets, and rotation factors, forward and backward."""
    w, a, runs = s.decoder.window, s.attended, {run for run in s.kernel_calls if run.rows}
    turned = [run.rows + run.keys for run in runs]
    parts = sum(n * w if turned_at_once(n * w, dim=a, launched=s.launched) else n for n in turned)
    places = max((max(run.keys, run.before + run.rows + 1) for run in runs), default=0)
    return w * 5 * w + 2 * (w + places + parts) * a


def _product_tables(s: RankSizes) -> int:
    """Tables of fused attention: rotation factors of the keys per slab and of each run's rows, forward and backward."""
    w, a = s.decoder.window, s.attended
    found = set[tuple[int, int, int]]()
    for band in s.bands:
        places, most = band.n_key_buckets + sum(band.around), band.largest + sum(band.around)
        found |= {(places, first, min(most, places - first)) for first in range(0, places, most)}
        found |= {(places, run.place + band.around[0] + 1, run.n_buckets) for run in band.runs}
    whole = [n for _, _, n in found if turned_at_once(n * w, dim=a, launched=True)]
    between = sum(places + 1 for places in {places for places, _, _ in found})
    return 2 * a * (w * bool(found) + between + w * sum(whole))


def _rows(s: RankSizes) -> int:
    # eager and chunked attention keep the norms of keys, before and after clamping
    return (4 if s.paper else 6) - 2 * (s.decoder.full or s.fused or s.in_kernels)


def attention_terms(s: RankSizes) -> Terms:
    """Tensors that attention keeps itself."""
    p, w, a = s.padded, s.decoder.window, s.attended
    if s.decoder.full:
        return {"attended values and sums of weights [N, D + 1]": s.element * s.anchors * (a + 1)}
    if s.in_kernels:
        return _kernel_terms(s)
    # complete buckets are exchanged, so a neighbour's rows are a bucket of w, however few are used
    halo = NEIGHBOUR[s.axes.attention] * a * s.halo
    terms = {"rows of the neighbours' buckets": s.element * halo} if halo else {}
    if s.fused:
        return terms | ({"weights [N, 3 w]": s.element * s.kept_weights} if s.kept_weights else {})
    terms["rotation [3 w, a]"] = s.element * 3 * w * a
    if s.axes.attention == "chunked":
        # inputs of the chunks, once: the backward pass recomputes scores and masks
        return terms | {"queries, keys, values of the buckets [P, a]": s.element * 3 * p * a}
    return terms | {
        "queries and values of the buckets [P + w C, a]": s.element * 2 * (p + w * s.chunks) * a,
        "neighbouring keys [P / w, 3 w, a]": s.element * 3 * p * a,
        "probabilities [P, 3 w]": s.element * 3 * p * w,
        "masks [C w, 3 w], [P / w, 3 w]": 3 * w * w * s.chunks + 3 * p,
    }


def _kernel_terms(s: RankSizes) -> Terms:
    """Tensors that attention in torch's kernels keeps; values that fill their buckets are not copied."""
    w, a, runs = s.decoder.window, s.attended, s.kernel_calls
    rows, keys = (w * sum(getattr(run, name) for run in runs) for name in ("rows", "keys"))
    # the pieces that a rank's outer buckets attend to are concatenated in new memory
    inner = 0 if s.ragged else runs[0].keys * w
    return {
        "turned rows and keys [P + M, a]": s.element * (rows + keys) * a,
        "values of whole buckets [M, a]": s.element * (keys - inner) * a,
        "outputs [P, a]": s.element * rows * a,
        "logarithms of the rows and norms of the keys [P + M]": s.element * (rows + keys),
    }
