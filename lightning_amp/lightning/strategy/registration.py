"""Register the strategy with Lightning: `Trainer(strategy="amp")`."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning_amp.errors import AmpError

if TYPE_CHECKING:
    from lightning_amp.lightning.strategy.strategy import AMPStrategy

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

START_METHODS: dict[str, StartMethod] = {
    "amp": "popen",
    "amp_spawn": "spawn",
    "amp_fork": "fork",
    "amp_notebook": "fork",
}


def register(registry: Any) -> None:
    """Add the strategy's names to Lightning's registry; those already there stay, so it may be called again."""
    for name, start_method in START_METHODS.items():
        if name not in registry:
            about = f"modality-aware parallelization, processes started by {start_method!r}"
            registry.register(name, partial(_make, start_method), about)


def refuse(registry: Any) -> None:
    """Make the names fail with advice in the twin package, whose classes Lightning's does not know."""
    for name in START_METHODS:
        if name not in registry:
            registry.register(name, partial(_refuse, name), "use lightning.pytorch")


def _make(start_method: StartMethod) -> "AMPStrategy":
    # late, for registering happens while Lightning itself is being imported
    from lightning_amp.lightning.strategy.strategy import AMPStrategy

    return AMPStrategy(start_method=start_method)


def _refuse(name: str) -> object:
    raise AmpError(
        f"strategy={name!r} does not support pytorch_lightning.Trainer; it works with lightning.pytorch, the same"
        " library under its newer name. Import Trainer, LightningModule and callbacks from lightning.pytorch"
    )
