"""Install `host_optimizer` where a LightningModule makes its optimizers."""

from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from lightning_amp._torch import tree_leaves
from lightning_amp.errors import InstallError
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.host_optimizer.row import HostOptimizer
from lightning_amp.techniques.host_optimizer.updates import HostUpdates
from lightning_amp.techniques.put_methods import method_of


def install(module: nn.Module, spec: HostOptimizer, mesh: Any) -> Change:
    """Let the optimizers that a LightningModule configures keep their state on the host."""
    if not isinstance(module, LightningModule):
        raise InstallError(f"host_optimizer requires a LightningModule, found {type(module).__name__!r}")
    if mesh is not None and mesh.size() > 1:
        raise InstallError(
            f"host_optimizer runs on one rank, found {mesh.size()}; several keep parameters, gradients and state on the"
            " host with fsdp_offload=True of fsdp"
        )
    updates, configure = HostUpdates(spec), method_of(module, "configure_optimizers")

    @wraps(configure)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        made = configure(module, *args, **kwargs)
        # those of an earlier fit are let go
        updates.stop()
        updates.of(module, [one for one in tree_leaves(made) if isinstance(one, Optimizer)])
        return made

    if mesh is not None and module._trainer is not None:
        # a rescue installs another plan when the optimizers exist
        updates.of(module, module._trainer.optimizers)
    return Change({}, methods={"configure_optimizers": run}, removed=updates.stop)
