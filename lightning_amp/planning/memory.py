"""The memory model: EPM(K) = M_base + sum over strata of Delta M_k, from shapes alone (Zhang et al. 2026, Eq. 2).

The paper writes K x Delta M; strata differ a little in their features, so Delta M_k is kept per stratum here and its
mean is what the paper calls Delta M (stratum_memory.py). What stands between that and the peak of a training step are
the tensors that a stratum makes and drops (stratum_peaks.py):

    forward pass     M_base, strata before k, the most that stratum k holds
                     M_base, all strata, other decoders
    backward pass    the same without the last step's gradients, the most that stratum k holds in its backward pass
    at its end       M_base, and the gradients at the border of the strata, or those of the sampled edges' ends

M_base is weights, optimiser state, the last step's gradients and base activations. The optimiser step holds fewer.

Known limits: bytes of one rank, the widest under S5 and the first under S2, which may be two where sizes do not
divide; S3 with the usual number of buckets in a chunk; what an allocator adds is not counted.
Legend: stratum_sizes.py.
"""

from dataclasses import dataclass
from itertools import accumulate

from lightning_amp.planning.plan import Axes
from lightning_amp.planning.shape import ModelShape
from lightning_amp.planning.stratum_memory import kept_bytes
from lightning_amp.planning.stratum_peaks import backward_moments, forward_moments
from lightning_amp.planning.stratum_sizes import StratumSizes, widest

NODE_BYTES = 8
"""Of the anchor of a feature, int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted bytes of one rank.

    Attributes:
        base_bytes: M_base: weights, optimiser state, gradients and base activations.
        stratum_bytes: Delta M_k of every stratum.
        forward_bytes: The most that every stratum holds in its forward pass, Delta M_k included.
        backward_bytes: The same for its backward pass.
        other_decoder_bytes: The most that the decoders hold which come after the strata.
        gradient_bytes: Gradients, which are gone when the backward pass starts.
        border_bytes: Gradients of what enters the strata, at the end of the backward pass.
        edge_bytes: Temporaries of the graph's backward pass, when the strata are gone again.
    """

    base_bytes: int
    stratum_bytes: tuple[int, ...] = ()
    forward_bytes: tuple[int, ...] = ()
    backward_bytes: tuple[int, ...] = ()
    other_decoder_bytes: int
    gradient_bytes: int
    border_bytes: int
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
        before = (self.base_bytes, *self.strata_bytes)
        forward = map(sum, zip(before, self.forward_bytes, strict=False))
        backward = map(sum, zip(before, self.backward_bytes, strict=False))
        return max(
            before[-1] + self.other_decoder_bytes,
            max(forward, default=0),
            max(backward, default=0) - self.gradient_bytes,
            self.base_bytes + max(self.border_bytes, self.edge_bytes),
        )


def estimate(shape: ModelShape, axes: Axes, *, model_ranks: int = 1) -> Estimate:
    """Predict the memory of a training step on one rank.

    Args:
        shape: The model, with the cells of one rank's batch.
        axes: The decoder's choices.
        model_ranks: R, over which hidden and feature parallelism split.
    """
    strata = _strata(shape, axes, model_ranks)
    parameters, buffers, inputs = shape.parameter_bytes, shape.buffer_bytes, 0
    if axes.features == "sharded":
        parameters -= shape.wide_weight_bytes - -(-shape.wide_weight_bytes // model_ranks)
        inputs -= shape.wide_input_bytes - -(-shape.wide_input_bytes // model_ranks)
        buffers += NODE_BYTES * sum(s.features for s in strata)
    entered, border = _border(shape, axes, model_ranks)
    return Estimate(
        base_bytes=buffers
        + parameters * (2 + shape.optimizer_slots)
        + shape.base_activation_bytes
        + inputs
        + entered,
        stratum_bytes=tuple(kept_bytes(s) for s in strata),
        forward_bytes=tuple(max(forward_moments(s).values()) for s in strata),
        backward_bytes=tuple(max(backward_moments(s).values()) for s in strata),
        other_decoder_bytes=shape.other_decoder_bytes,
        gradient_bytes=parameters,
        border_bytes=border,
        edge_bytes=shape.edge_bytes,
    )


def _strata(shape: ModelShape, axes: Axes, model_ranks: int) -> list[StratumSizes]:
    decoder = shape.decoder
    if decoder is None:
        return []
    return [
        StratumSizes(
            decoder=decoder,
            axes=axes,
            k=k,
            cells=shape.batch_size,
            model_ranks=model_ranks,
            element=shape.element_bytes,
        )
        for k in range(len(decoder.features))
    ]


def _border(shape: ModelShape, axes: Axes, model_ranks: int) -> tuple[int, int]:
    """Copies of u and v [N + B, d] that enter the strata, and the most that their gradients take."""
    decoder = shape.decoder
    if decoder is None:
        return 0, 0
    rows = shape.element_bytes * (decoder.anchors + shape.batch_size)
    if axes.placement != "replicated":
        own = rows * widest(decoder.dim, model_ranks)
        # the gradients take the place of the copies, are gathered as [R, N + B, d], and joined
        return own, 2 * model_ranks * own
    # under S2 joined and summed, in copies
    return 0, rows * decoder.dim * (3 if axes.features == "sharded" else 1)
