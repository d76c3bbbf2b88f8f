"""Define what techniques can read of a module's training step before it is planned."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from lightning.pytorch import LightningModule

from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain_of import CountedStep

T = TypeVar("T")


class StepToPlan(Protocol):
    """A training step that is run on fake tensors, as often as techniques need it.

    Attributes:
        module: Whose step it is.
        shared_statistics: Whether ranks exchange the statistics of batches.
        no_stages: Why the blocks of the module cannot be stages of a pipeline; "" where they can.
    """

    module: LightningModule
    shared_statistics: bool
    no_stages: str

    def step(self, rows: int | None = None) -> CountedStep:
        """The step as it is, for a batch of so many rows, None for the batch of the run; counted once for each."""

    def step_with(self, rules: Sequence[Rule], rows: int | None = None) -> CountedStep:
        """The step with rules installed, which are undone.

        Raises:
            AmpError: A technique refuses the module, or the step fails with it.
        """

    def run_with(self, rules: Sequence[Rule], count: Callable[..., T]) -> T:
        """What `count(module, batch, batch_size=, around=)` returns while rules are installed; raises as above."""

    def operator_rates(self) -> Any:
        """Rates that the times of operators follow from."""
