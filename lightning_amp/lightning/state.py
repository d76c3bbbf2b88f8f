"""The state of a strategy whose module holds shards: whole for everyone outside, in checkpoints and in hooks."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

from lightning_amp.lightning.shards import Shards


class WholeState(DDPStrategy):
    """Saves and loads whole parameters, with their optimiser states."""

    _shards: Shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with whole parameters; a collective where some are sharded."""
        return self._shards.whole_state(super().lightning_module_state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state with whole parameters."""
        own = {**checkpoint, "state_dict": self._shards.own_state(checkpoint["state_dict"])}
        super().load_model_state_dict(own, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's state as for whole parameters; a collective where some are sharded."""
        return self._shards.whole_optimizer_state(optimizer, super().optimizer_state(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states for whole parameters."""
        own = self._shards.own_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})
