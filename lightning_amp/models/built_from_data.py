"""A LightningModule whose networks are made from the data, and whose checkpoints can be loaded without them."""

from abc import abstractmethod
from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_amp.errors import ModelError
from lightning_amp.models.inputs import ModelInputs, inputs_from

CHECKPOINT_KEY = "model_inputs"

Self = TypeVar("Self", bound="BuiltFromData")


class BuiltFromData(pl.LightningModule):
    """Abstract: a subclass says in `make_networks` what to make.

    Attributes:
        inputs: what the networks were made from; None before they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: ModelInputs | None = None

    @abstractmethod
    def make_networks(self, inputs: ModelInputs) -> None:
        """Make the networks; called once."""

    def build(self: Self, inputs: ModelInputs) -> Self:
        """Make the networks for some data, without a trainer.

        Raises:
            ModelError: they exist already, or do not fit the settings.
        """
        if self.inputs is not None:
            raise ModelError(
                f"{type(self).__name__}.build was called, but its networks exist already; make a new "
                f"{type(self).__name__} for other data"
            )
        self.make_networks(inputs)
        self.inputs = inputs
        return self

    def built_inputs(self) -> ModelInputs:
        """What the networks were made from.

        Raises:
            ModelError: there are none yet.
        """
        if self.inputs is None:
            raise ModelError(
                f"{type(self).__name__} has no networks yet; call build(inputs), fit it with a data module, or "
                "load a checkpoint"
            )
        return self.inputs

    def configure_model(self) -> None:
        """Build the networks from the trainer's data module, unless they exist.

        Raises:
            ModelError: the trainer has no data module to build from.
        """
        if self.inputs is not None or not self._has_trainer():
            return
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        if datamodule is None:
            raise ModelError(
                f"{type(self).__name__} was given to a Trainer without a data module, so its sizes are unknown; pass "
                "datamodule=SingleCellDataModule(...), or call build(inputs) first"
            )
        self.build(inputs_from(datamodule))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the inputs, so that the networks can be built without the data."""
        if self.inputs is not None:
            checkpoint[CHECKPOINT_KEY] = self.inputs.to_plain()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the networks the checkpoint was written with, or check that these are the same.

        Raises:
            ModelError: the checkpoint is not this class's, or was trained on other features or another graph.
        """
        if CHECKPOINT_KEY not in checkpoint:
            raise ModelError(
                f"the checkpoint has no {CHECKPOINT_KEY!r}, only {sorted(checkpoint)!r}; load one that "
                f"{type(self).__name__} wrote"
            )
        inputs = ModelInputs.from_plain(checkpoint[CHECKPOINT_KEY])
        if self.inputs is None:
            self.build(inputs)
        elif (name := self.inputs.difference(inputs)) is not None:
            raise ModelError(
                f"the checkpoint was trained on other data: {name!r} differs; use the data it was trained on, "
                "or train anew"
            )

    def _has_trainer(self) -> bool:
        try:
            return self.trainer is not None
        except RuntimeError:  # Lightning has no public question for it
            return False
