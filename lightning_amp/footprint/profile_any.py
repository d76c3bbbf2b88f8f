"""What `lightning_amp.profile` is: of a data directory what its files say, of a module what its training step holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile as profile_data

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_amp.footprint.module_profile import ModuleProfile


@overload
def profile(what: str | Path, *, setting: str | None = None, attention: bool | None = None) -> Profile: ...


@overload
def profile(what: "LightningModule", batch: Any, *, batch_size: int | None = None) -> "ModuleProfile": ...


def profile(
    what: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    setting: str | None = None,
    attention: bool | None = None,
) -> Any:
    """Profile a data directory, or a training step of a module.

    Args:
        what: The path of a data directory; or any LightningModule, whose parameters may be on the device "meta".
        batch: For a module: an example of what its `training_step` gets.
        batch_size: For a module: profile a batch of this length instead of the example's.
        setting: For a directory: which files to take where it holds several settings.
        attention: For a directory: whether the Hi-C decoder builds its keys with attention.

    Returns:
        A Profile of the directory, or a ModuleProfile.

    Raises:
        DataError: The directory or one of its files cannot be read.
        ModelError: The module's step fails, or `what` is neither a path nor a LightningModule.
    """
    if isinstance(what, str | Path):
        return profile_data(what, setting=setting, attention=attention)
    # torch is loaded here: a directory is profiled without it
    from lightning_amp.footprint.profile_module import profile_module

    return profile_module(what, batch, batch_size=batch_size)
