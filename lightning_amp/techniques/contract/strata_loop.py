"""Define the interface of a decoder's loop over strata for techniques; the reference is models' EveryStratum."""

from typing import Generic, NamedTuple, TypeVar

from torch import nn

T = TypeVar("T")


class StratumInputs(NamedTuple, Generic[T]):
    """What strata read besides their parameters and may have a gradient: tensors, or the gradient of each."""

    u: T
    v: T
    log_weights: T
    library: T


class LoopTechnique(nn.Module):
    """A technique in the place of a strata loop; its `forward` takes `latents` (u, v, log_weights) as the loop does.

    Args:
        inner: The loop that was there before.
    """

    is_technique = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
