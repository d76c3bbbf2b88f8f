"""The memory model: EPM(K) = M_base + sum over strata of Delta M_k, from shapes alone (Zhang et al. 2026, Eq. 2).

The paper writes K x Delta M; strata differ a little in their features, so Delta M_k is kept per stratum here and its
mean is what the paper calls Delta M. Every term names the tensor that it counts. A training step holds

    weights, optimiser state, the last step's gradients, base activations, strata   at the end of the forward pass
    the same without gradients, and the temporaries of one stratum's backward pass  at the start of the backward pass

    base and gradients again, and the gradients of the sampled edges' ends          at the end of the backward pass

and its peak is the largest of the three; the optimiser step holds neither activations nor temporaries.

Legend: B cells, N anchors, P = N padded to whole buckets of w, D latent dimension, F_k features of stratum k,
R ranks of the model axis.
"""

from dataclasses import dataclass
from itertools import accumulate

from lightning_amp.planning.chunks import chunk_buckets as chunk_buckets
from lightning_amp.planning.plan import Axes
from lightning_amp.planning.shape import DecoderShape, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted bytes of one rank.

    Attributes:
        base_bytes: M_base: weights, optimiser state, gradients and base activations.
        stratum_bytes: Delta M_k of every stratum.
        other_decoder_bytes: Kept by the decoders without strata.
        transient_bytes: Largest temporaries of one stratum's backward pass.
        gradient_bytes: Gradients, which are gone when the backward pass starts.
        edge_bytes: Temporaries of the graph's backward pass, when the strata are gone again.
    """

    base_bytes: int
    stratum_bytes: tuple[int, ...]
    other_decoder_bytes: int
    transient_bytes: int
    gradient_bytes: int
    edge_bytes: int

    @property
    def strata_bytes(self) -> tuple[int, ...]:
        """Bytes held after every stratum of the forward pass."""
        return tuple(accumulate(self.stratum_bytes, initial=self.base_bytes))[1:]

    @property
    def mean_stratum_bytes(self) -> int:
        """What the paper calls Delta M; 0 without strata."""
        return sum(self.stratum_bytes) // max(1, len(self.stratum_bytes))

    @property
    def peak_bytes(self) -> int:
        """Peak of the step."""
        forward = self.base_bytes + sum(self.stratum_bytes) + self.other_decoder_bytes
        strata = forward + max(0, self.transient_bytes - self.gradient_bytes)
        return max(strata, self.base_bytes + self.edge_bytes)


def estimate(shape: ModelShape, axes: Axes, *, model_ranks: int = 1) -> Estimate:
    """Predict the memory of a training step on one rank.

    Args:
        shape: The model, with the cells of one rank's batch.
        axes: The decoder's choices.
        model_ranks: R, over which hidden and feature parallelism split.
    """
    weights = shape.buffer_bytes + shape.parameter_bytes * (2 + shape.optimizer_slots)
    strata: tuple[int, ...] = ()
    transient = 0
    if shape.decoder is not None:
        indices = range(len(shape.decoder.features))
        strata = tuple(sum(stratum_terms(shape, axes, k, model_ranks=model_ranks).values()) for k in indices)
        transient = max(_transient(shape, axes, k, model_ranks) for k in indices)
    return Estimate(
        base_bytes=weights + shape.base_activation_bytes,
        stratum_bytes=strata,
        other_decoder_bytes=shape.other_decoder_bytes,
        transient_bytes=transient,
        gradient_bytes=shape.parameter_bytes,
        edge_bytes=shape.edge_bytes,
    )


def stratum_terms(shape: ModelShape, axes: Axes, k: int, *, model_ranks: int = 1) -> dict[str, int]:
    """What stratum k leaves for the backward pass, in bytes by name of the tensor.

    The factors count the tensors that the reference decoder keeps; tests compare them with the bytes alive after
    every stratum.

    Args:
        shape: The model.
        axes: The decoder's choices.
        k: Stratum, 0 to K - 1.
        model_ranks: R.
    """
    decoder = shape.decoder
    assert decoder is not None, "strata are only counted for a decomposed decoder"
    terms = _likelihood_terms(shape, axes, k, model_ranks)
    if decoder.distances[k] == 0:
        return terms
    if not decoder.attention:
        return terms | _convolution_terms(decoder, axes, model_ranks, shape.element_bytes)
    return terms | _attention_terms(decoder, axes, model_ranks, shape.element_bytes)


def _likelihood_terms(shape: ModelShape, axes: Axes, k: int, ranks: int) -> dict[str, int]:
    decoder = shape.decoder
    assert decoder is not None, "strata are only counted for a decomposed decoder"
    features = decoder.features[k] if axes.features == "all" else -(-decoder.features[k] // ranks)
    # With one experimental batch a table's row is broadcast, with several every cell has a copy of its own.
    copies, rows = (9, 4) if decoder.n_batches == 1 else (15, 0)
    return {
        "decoded scores and likelihood [B, F_k]": shape.element_bytes * copies * shape.batch_size * features,
        "x == 0 [B, F_k]": shape.batch_size * features,
        "rows of the tables [F_k]": shape.element_bytes * rows * features,
    }


def _width(decoder: DecoderShape, axes: Axes, ranks: int) -> int:
    return decoder.dim if axes.placement != "hidden" else -(-decoder.dim // ranks)


def _padded(decoder: DecoderShape) -> int:
    return -(-decoder.anchors // decoder.window) * decoder.window


def _attention_terms(decoder: DecoderShape, axes: Axes, ranks: int, element: int) -> dict[str, int]:
    n, p, w, d = decoder.anchors, _padded(decoder), decoder.window, _width(decoder, axes, ranks)
    paper = decoder.variant == "paper"
    terms = {
        "norms, projections, feed-forward, key [N, D]": element * (8 - paper + decoder.chained) * n * d,
        "means, deviations and norms [N]": element * (4 if paper else 6) * n,
        "rotation [3 w, D]": element * 3 * w * d,
    }
    if axes.attention == "chunked":
        return terms | {"queries, keys, values of the buckets [P, D]": element * 3 * p * d}
    return terms | {
        "queries and values of the buckets [P, D]": element * (2 * p + 2 * w) * d,
        "neighbouring keys [P / w, 3 w, D]": element * 3 * p * d,
        "probabilities [P, 3 w]": element * 3 * p * w,
        "masks": 3 * w * w + 3 * p,
    }


def _convolution_terms(decoder: DecoderShape, axes: Axes, ranks: int, element: int) -> dict[str, int]:
    return {"anchors, convolution, key [N, D]": element * 3 * decoder.anchors * _width(decoder, axes, ranks)}


def _transient(shape: ModelShape, axes: Axes, k: int, ranks: int) -> int:
    """Bytes that the backward pass of stratum k needs on top of what was kept: its gradients, while they flow."""
    decoder = shape.decoder
    assert decoder is not None, "strata are only counted for a decomposed decoder"
    features = decoder.features[k] if axes.features == "all" else -(-decoder.features[k] // ranks)
    likelihood = shape.element_bytes * 7 * shape.batch_size * features
    if axes.decode == "full":
        likelihood += shape.element_bytes * shape.batch_size * decoder.anchors
    if decoder.distances[k] == 0 or not decoder.attention:
        return likelihood
    p, w, d = _padded(decoder), decoder.window, _width(decoder, axes, ranks)
    if axes.attention == "eager":
        return max(likelihood, shape.element_bytes * (3 * p * w + 2 * p * d))
    rows = min(p, chunk_buckets(w) * w)
    return max(likelihood, shape.element_bytes * (rows * (6 * w + 5 * d) + p * d))
