"""Give the state of sharded parameters as whole tensors: to hooks, in checkpoints, and from checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_amp.lightning._compat import trainer_of
from lightning_amp.lightning.checkpoints.read_directory import load_either
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.checkpoints.write_directory import write_directory
from lightning_amp.lightning.consistency.replicas import wait_for_all
from lightning_amp.lightning.faults.failure_watch import FailureWatch
from lightning_amp.lightning.strategy.mesh_strategy import MeshStrategy
from lightning_amp.lightning.strategy.request import Request


class WholeState(MeshStrategy):
    """A strategy whose module and optimisers may hold parts of parameters.

    Attributes:
        request: The options, as given.
    """

    request: Request
    _shards: Shards
    _failures: FailureWatch

    def _compare_ranks(self) -> None:
        """Compare the ranks; a strategy that trains does."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with whole parameters; for all ranks, which are compared.

        With `save_distributed_checkpoint` a sharded tensor is this rank's `Part` instead.
        """
        trainer = trainer_of(self.lightning_module)
        with self._failures.saving():
            failed = trainer is not None and trainer.interrupted
            wait_for_all(rank=self.global_rank, ranks=self.world_size, failed=failed)
            state = super().lightning_module_state_dict()
            state = self._shards.saved_state(state, in_parts=self.request.save_distributed_checkpoint)
        self._compare_ranks()
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state with whole parameters."""
        own = {**checkpoint, "state_dict": self._shards.own_state(checkpoint["state_dict"])}
        super().load_model_state_dict(own, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's state as for whole parameters; a collective where some are sharded."""
        in_parts = self.request.save_distributed_checkpoint
        state = super().optimizer_state(optimizer)
        return self._shards.saved_optimizer_state(optimizer, state, in_parts=in_parts)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states for whole parameters."""
        own = self._shards.own_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        if not self._shards.on_host:
            super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})
            return
        # Lightning would move it to the device; torch puts it where the parameters lie
        for optimizer, state in zip(self.optimizers, own, strict=False):
            optimizer.load_state_dict(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a file on rank 0, or a directory of shards, a collective."""
        if self.request.save_distributed_checkpoint:
            write_directory(
                checkpoint, filepath, storage_options, rank=self.global_rank, broadcast=self.broadcast
            )
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file or a directory of shards, whichever this strategy would write."""
        return load_either(checkpoint_path, super().load_checkpoint, weights_only=weights_only)
