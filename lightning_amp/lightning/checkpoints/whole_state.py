"""The state of a strategy whose module holds shards: whole for everyone outside, in checkpoints and in hooks.

With `save_distributed_checkpoint` a checkpoint is a directory to which every rank writes its part; hooks then see a
`Part` in place of a sharded tensor. Either kind is loaded whatever the option says.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

from lightning_amp.errors import PlanError
from lightning_amp.lightning._compat import trainer_of
from lightning_amp.lightning.checkpoints.read_directory import fill, open_directory, refuse_interrupted
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.checkpoints.write_directory import replacing_directory, write_directory
from lightning_amp.lightning.same_on_ranks.all_ranks_save import wait_for_all


class WholeState(DDPStrategy):
    """Saves and loads whole parameters, with their optimiser states."""

    _shards: Shards
    _save_distributed: bool

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with whole parameters; a collective where some are sharded, and for all ranks always."""
        trainer = trainer_of(self.lightning_module)
        failed = trainer is not None and trainer.interrupted
        wait_for_all(rank=self.global_rank, ranks=self.world_size, failed=failed)
        return self._shards.saved_state(
            super().lightning_module_state_dict(), in_parts=self._save_distributed
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state with whole parameters."""
        own = {**checkpoint, "state_dict": self._shards.own_state(checkpoint["state_dict"])}
        super().load_model_state_dict(own, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's state as for whole parameters; a collective where some are sharded."""
        state = super().optimizer_state(optimizer)
        return self._shards.saved_optimizer_state(optimizer, state, in_parts=self._save_distributed)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states for whole parameters."""
        own = self._shards.own_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a file on rank 0, or a directory of shards, a collective.

        Raises:
            DataError: The directory could not be written.
            PlanError: A directory was asked for with options of a file, or at an address.
        """
        if not self._save_distributed:
            save = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
            if self.is_global_zero:
                replacing_directory(Path(filepath), save)
            return
        if storage_options is not None or "://" in str(filepath):
            raise PlanError(
                f"save_distributed_checkpoint=True was asked for, and a checkpoint {str(filepath)!r} with"
                f" storage_options={storage_options!r}; shards are written to a folder of a file system, without"
                " options: give a path, or leave save_distributed_checkpoint out"
            )
        write_directory(
            checkpoint, Path(self.broadcast(str(filepath))), rank=self.global_rank, broadcast=self.broadcast
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A file, or a directory of shards, whose optimiser states are read when the optimisers load them.

        Raises:
            DataError: The directory cannot be read.
        """
        path = Path(checkpoint_path)
        refuse_interrupted(path)
        if not path.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        checkpoint = open_directory(path, self.checkpoint_io.load_checkpoint, weights_only=weights_only)
        return {**checkpoint, "state_dict": fill(checkpoint["state_dict"])}
