"""Import the private names of Lightning that this package uses, with the reason for each."""

# the default of DDPStrategy's own argument, which Lightning does not export
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout  # type: ignore[attr-defined]

# seeds the workers of a loader with the rank, which Lightning does before it iterates the loader
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as add_worker_seeds

# the `device` of LightningModules and metrics, which their `to` sets
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as update_properties

# moves optimiser state next to the parameters after loading; DDPStrategy.setup does the same
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch import LightningModule, Trainer

# broadcasts parameters and buffers from rank 0 in large buffers; DDPStrategy uses it outside fitting
from lightning.pytorch.overrides.distributed import _sync_module_states as broadcast_module

# starts ranks by multiprocessing, and raises their errors as text
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher

# starts the processes of other ranks, and ends this one if one of them fails; replaced by the failure detector
from lightning.pytorch.strategies.launchers.subprocess_script import _launch_process_observer as launch_process_observer  # type: ignore[attr-defined]
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher

# chooses the sampler of every loader before the strategy is called; calls a loader's hook and records its arguments
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector as DataConnector
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader as request_dataloader

# used throughout Lightning and documented, but not exported for type checkers
from lightning.pytorch.utilities.rank_zero import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn  # type: ignore[attr-defined]

__all__ = ["DataConnector", "MultiProcessingLauncher", "ScriptLauncher", "add_worker_seeds", "broadcast_module"]
__all__ += ["default_pg_timeout", "launch_process_observer", "optimizers_to_device", "rank_zero_info"]
__all__ += [
    "rank_zero_deprecation",
    "rank_zero_only",
    "rank_zero_warn",
    "request_dataloader",
    "trainer_of",
    "update_properties",
]


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the Trainer of a module, or None; the public property raises if there is none."""
    return None if module is None else module._trainer
