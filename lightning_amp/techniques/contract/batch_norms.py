"""Detect layers that normalise by the statistics of a batch."""

from torch import nn

# the common base of BatchNorm1d, 2d and 3d has no public name
from lightning_amp._torch import AnyBatchNorm


def normalises_by_batch(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm that trains, or has no running statistics and is the same in both modes."""
    return isinstance(layer, AnyBatchNorm) and (
        layer.training or (layer.running_mean is None and layer.running_var is None)
    )
