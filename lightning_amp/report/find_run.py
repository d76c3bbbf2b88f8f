"""Find the checkpoint and the data of a run by its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_amp.errors import DataError, ModelError
from lightning_amp.lightning.command_line import CONFIG_USED
from lightning_amp.models.trained_model import find_checkpoint

DATA_MODULE = "SingleCellDataModule"
OTHER_VERBS = {"return_predictions", "verbose"}
"""Entries of the configurations of predict, and of validate and test, whose data may be other cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A trained model and its data."""

    folder: Path
    checkpoint: Path
    data: dict[str, Any]  # arguments of SingleCellDataModule


def find_run(path: str | Path, *, data: str | Path | None = None) -> Run:
    """Find a run by the folder of its logs, a folder that holds this one, or its checkpoint.

    Args:
        path: The folder, or the checkpoint.
        data: Data directory; None reads it from the configuration that `lightning-amp fit` has saved.

    Raises:
        ModelError: There is no checkpoint.
        DataError: It is not known which data the model was trained on.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    # a run of the command line saves its configuration with its logs
    places = [folder, folder.parent] if path.is_file() else [folder]
    configs = [file for place in places for depth in ("", "*/", "*/*/") for file in place.glob(f"{depth}{CONFIG_USED}")]
    newest_first = sorted(configs, key=lambda file: -file.stat().st_mtime)
    read = (yaml.safe_load(file.read_text()) or {} for file in newest_first)
    config: dict[str, Any] = next((one for one in read if not OTHER_VERBS & set(one)), {})
    try:
        checkpoint = find_checkpoint(path)
    except ModelError:
        folders = [place for place in _checkpoint_folders(config) if place.is_dir()]
        if not folders:
            raise
        checkpoint = find_checkpoint(folders[0])
    if data is not None:
        return Run(folder=folder, checkpoint=checkpoint, data={"data_dir": data})
    section = config.get("data") or {}
    arguments = section.get("init_args") or {}
    if not str(section.get("class_path")).endswith(DATA_MODULE):
        raise DataError(
            f"{path}: no {CONFIG_USED} of `lightning-amp fit` names its data; name their directory: --data DIR"
        )
    if not Path(arguments["data_dir"]).is_dir():
        raise DataError(
            f"{path}: the run's data are at {arguments['data_dir']!r}, which is no folder seen from here; name"
            " their directory: --data DIR"
        )
    kept = {name: arguments[name] for name in ("data_dir", "setting", "modalities") if arguments.get(name) is not None}
    return Run(folder=folder, checkpoint=checkpoint, data=kept)


def _checkpoint_folders(config: dict[str, Any]) -> list[Path]:
    """Return the folders that a configuration gives to its checkpoints."""
    callbacks = (config.get("trainer") or {}).get("callbacks") or []
    found = [callback.get("init_args", {}).get("dirpath") for callback in callbacks if isinstance(callback, dict)]
    return [Path(folder) for folder in found if folder is not None]
