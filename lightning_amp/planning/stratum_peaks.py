"""The most that one stratum holds in its forward and in its backward pass, in bytes of one rank by name of the moment.

A moment counts all that the stratum holds then, its kept tensors included, and nothing of other strata. Which is the
highest depends on the shape: with many cells the likelihood, with wide windows attention, with many ranks under S5 the
products of the feed-forward layer, which are of all output channels. Moments that are never the highest are left out:
the backward pass of decode, and the forward pass of attention that is recomputed in the backward pass.
Legend: stratum_sizes.py.
"""

from lightning_amp.planning.stratum_memory import (
    Terms,
    attention_terms,
    kept_bytes,
    key_terms,
    statistic_terms,
)
from lightning_amp.planning.stratum_sizes import StratumSizes


def forward_moments(s: StratumSizes) -> Terms:
    """Moments of the forward pass."""
    made = sum(key_terms(s).values())
    # val, and under `gather` the own part of qk: dropped when the key is made
    parts = (not s.decoder.chained) + s.gathered if s.attends else 0
    # tensors [B, f_k] that the sum of log-probabilities makes and drops
    passing = 5 if s.decoder.n_batches == 1 else 7
    moments = {
        "likelihood": kept_bytes(s) + s.element * passing * s.scores,
        "decode": made + s.element * (parts * s.rows + _decoding(s)),
    }
    if not s.attends:
        return moments
    # the gated value; or the products of gate and value [R, N, 2 d], when GELU and key are still to come
    gate = max(0 if s.paper else s.rows, 2 * s.products - 2 * s.rows)
    moments["feed-forward"] = made + s.element * (parts * s.rows + gate)
    if s.axes.attention != "chunked":
        moments["attention"] = sum(statistic_terms(s).values()) + _attending(s)
    return moments


def backward_moments(s: StratumSizes) -> Terms:
    """Moments of the backward pass."""
    made = sum(key_terms(s).values())
    # gradients [B, f_k]
    passing = 7 if s.decoder.n_batches == 1 else 6
    moments = {"likelihood": kept_bytes(s) + s.element * passing * s.scores}
    if s.attends:
        # three gradients [N, d] in place of the key; or those of gate and value from all ranks [R, N, 2 d] and their
        # products with the weights [R, N, d], when key, GELU, gate and value are gone
        gate = max(2 * s.rows, 3 * s.products - 3 * s.rows)
        moments["feed-forward"] = made + s.element * gate
        moments["attention"] = sum(statistic_terms(s).values()) + _attending_back(s)
    elif s.keyed:
        moments["convolution"] = s.element * 4 * s.rows
    return moments


def _decoding(s: StratumSizes) -> int:
    """Scores on their way: without S4 of all anchors, and in copies where each goes to its owner."""
    everything = s.cells * s.decoder.anchors if s.axes.decode == "full" else 0
    return everything + (3 if s.scattered else 1) * s.cells * s.decoded


def _attending(s: StratumSizes) -> int:
    """Attention with its inputs and outputs, at its last chunk."""
    p, w, a, r = s.padded, s.decoder.window, s.attended, s.chunk
    # of all channels, before the own ones are taken
    products = r * a if s.gathered else 0
    tensors = {
        "p, qk, val [N, d]": 3 * s.rows,
        "queries, keys, values of the buckets [P, a]": 3 * p * a,
        "scores [r, 3 w], or keys while they are rotated": max(3 * r * w + products, 2 * r * a),
        "outputs [P, d]": p * s.width,
    }
    return sum(attention_terms(s).values()) + s.element * sum(tensors.values())


def _attending_back(s: StratumSizes) -> int:
    """Attention in its backward pass: the softmax's moment, or that of the sums over chunks, whichever holds more."""
    p, w, a, r = s.padded, s.decoder.window, s.attended, s.chunk
    # p, qk, and the gradients of key and val
    inputs = (4 - s.gathered) * s.rows
    # gradients of queries, keys and values, from the chunks done before
    so_far = 3 * p * a if s.chunks > 1 else 0
    chunk = r * (6 * w + 6 * a) + (r * a if s.gathered else 0)
    summed = so_far + chunk + 2 * p * a
    kept = sum(attention_terms(s).values())
    if s.axes.attention == "chunked":
        softmax = so_far + chunk + 3 * r * w
        return kept + 3 * w * w + s.element * (inputs + max(softmax, summed))
    return max(kept + s.element * (inputs + 6 * r * w), s.element * (inputs + summed))
