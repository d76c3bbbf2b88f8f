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
    """Register the strategies with Lightning; registered names are kept, so that repeated calls are allowed."""
    for name, start_method in START_METHODS.items():
        if name not in registry:
            about = f"modality-aware parallelization, processes started by {start_method!r}"
            registry.register(name, partial(_make, start_method), about)


def refuse(registry: Any) -> None:
    """Register names in `pytorch_lightning` that raise an error with advice: its classes are not Lightning's."""
    for name in START_METHODS:
        if name not in registry:
            registry.register(name, partial(_refuse, name), "use lightning.pytorch")


def _make(start_method: StartMethod) -> "AMPStrategy":
    # imported late: registration runs while Lightning itself is being imported
    from lightning_amp.lightning.strategy.strategy import AMPStrategy

    return AMPStrategy(start_method=start_method)


def _refuse(name: str) -> object:
    raise AmpError(
        f"strategy={name!r} does not support pytorch_lightning.Trainer; it works with lightning.pytorch, the same"
        " library under its newer name. Import Trainer, LightningModule and callbacks from lightning.pytorch"
    )
