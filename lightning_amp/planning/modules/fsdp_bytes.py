"""Peak bytes of a rank when parameters, gradients and optimiser state are split over the data axis by FSDP2.

Legend: R ranks of the data axis; a unit is what is gathered together, a block or the rest of the module ("").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lightning_amp.footprint.module_profile import ModuleProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter.

    Attributes:
        name: In the LightningModule.
        shape: Of the whole.
        item_bytes: Bytes of an entry.
        trained: Whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    trained: bool = True

    @property
    def whole_bytes(self) -> int:
        """Of all entries."""
        return self.item_bytes * prod(self.shape)

    def shard_bytes(self, ranks: int) -> int:
        """Of one rank's rows, those that the first rank has: ceil(rows / R)."""
        rows = -(-self.shape[0] // ranks)
        return self.item_bytes * rows * prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Parameters that are gathered together: of the block `fqn`, or with "" of all that is in no block."""

    fqn: str
    parameters: tuple[ParameterShape, ...]

    @property
    def whole_bytes(self) -> int:
        """Of its parameters."""
        return sum(parameter.whole_bytes for parameter in self.parameters)

    def padded_bytes(self, ranks: int) -> int:
        """Of its parameters as ranks send them: R parts of equal size."""
        return ranks * sum(parameter.shard_bytes(ranks) for parameter in self.parameters)


def fsdp_peak_bytes(profile: ModuleProfile, units: Sequence[Unit], ranks: int) -> int:
    """Most bytes that a rank has at once in a training step, the second one.

    Args:
        profile: Of the rank's own batch, on one device.
        units: All of them, the root last; parallel/fsdp/units.py reads them from a module.
        ranks: Of the data axis, 2 or more.
    """
    raise NotImplementedError
