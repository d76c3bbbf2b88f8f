"""Install `early_update` around the backward pass of a LightningModule."""

from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp.errors import InstallError
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.early_update.row import EarlyUpdate
from lightning_amp.techniques.early_update.updates import LEAVE_OUT, EarlyUpdates
from lightning_amp.techniques.put_methods import method_of


def install(module: nn.Module, spec: EarlyUpdate, mesh: Any) -> Change:
    """Replace the backward pass of a LightningModule by one that updates parameters."""
    if not isinstance(module, LightningModule):
        raise InstallError(f"early_update requires a LightningModule, found {type(module).__name__!r}")
    if mesh is not None and mesh.size() > 1:
        raise InstallError(
            f"early_update runs on one rank, found {mesh.size()}, which average gradients after the backward pass;"
            f" {LEAVE_OUT}"
        )
    updates, backward = EarlyUpdates(spec.bucket_bytes), method_of(module, "backward")

    @wraps(backward)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        with updates.during(module):
            return backward(module, *args, **kwargs)

    return Change({}, methods={"backward": run}, removed=updates.stop)
