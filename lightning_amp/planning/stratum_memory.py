"""What one stratum keeps for the backward pass, in bytes of one rank by name of the tensor.

The factors count the tensors of the reference decoder; tests compare the sums with the bytes of simulated steps.
Legend: stratum_sizes.py.
"""

from lightning_amp.planning.stratum_sizes import StratumSizes

Terms = dict[str, int]


def kept_bytes(s: StratumSizes) -> int:
    """Everything that a stratum leaves for the backward pass."""
    return sum((likelihood_terms(s) | key_terms(s)).values())


def likelihood_terms(s: StratumSizes) -> Terms:
    """From the decoded scores to the loss."""
    # With one experimental batch a table's row is broadcast, with several every cell has a copy of its own.
    copies, rows = (9, 4) if s.decoder.n_batches == 1 else (15, 0)
    return {
        "decoded scores and likelihood [B, f_k]": s.element * copies * s.scores,
        "x == 0 [B, f_k]": s.scores,
        "rows of the tables [f_k]": s.element * rows * s.features,
    }


def key_terms(s: StratumSizes) -> Terms:
    """The key, and all that it is made of."""
    if s.copies_keys:
        terms = {"keys of the features [F_k, d]": s.element * s.decoded * s.width}
    else:
        terms = {"key [N, d]": s.element * s.rows} if s.keyed else {}
    if s.attends:
        return terms | layer_terms(s) | statistic_terms(s) | attention_terms(s)
    if s.keyed:
        terms["anchors, convolution [N, d]"] = s.element * 2 * s.rows
    return terms


def layer_terms(s: StratumSizes) -> Terms:
    """Norms, projections and feed-forward: p, qk, attended key, its norm, twice gate and value, GELU.

    The paper's form has no second norm, under `gather` qk is kept gathered, and a chained decoder keeps val.
    """
    tensors = 7 - s.paper - s.gathered + s.decoder.chained
    return {"norms, projections, feed-forward [N, d]": s.element * tensors * s.rows}


def statistic_terms(s: StratumSizes) -> Terms:
    """What the layers keep beside tensors [N, d]."""
    terms = {"means, deviations and norms [N]": s.element * (4 if s.paper else 6) * s.decoder.anchors}
    if s.ranks > 1:
        terms["own columns of four square weights [D, d]"] = s.element * 4 * s.decoder.dim * s.width
    if s.gathered:
        terms["gathered keys and values [2 N, D]"] = s.element * 2 * s.decoder.anchors * s.decoder.dim
    return terms


def attention_terms(s: StratumSizes) -> Terms:
    """What attention keeps by itself."""
    p, w, a = s.padded, s.decoder.window, s.attended
    terms = {"rotation [3 w, a]": s.element * 3 * w * a}
    if s.axes.attention == "chunked":
        return terms | {"queries, keys, values of the buckets [P, a]": s.element * 3 * p * a}
    return terms | {
        "queries and values of the buckets [P + w C, a]": s.element * 2 * (p + w * s.chunks) * a,
        "neighbouring keys [P / w, 3 w, a]": s.element * 3 * p * a,
        "probabilities [P, 3 w]": s.element * 3 * p * w,
        "masks [C w, 3 w], [P / w, 3 w]": 3 * w * w * s.chunks + 3 * p,
    }
