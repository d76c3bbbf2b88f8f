"""Read module, data module and strategy options from a configuration file of `lightning-amp fit`, without a run."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.errors import DataError, ModelError
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.command_line import CommandLine
from lightning_amp.lightning.profiling.loaders import example_batch
from lightning_amp.lightning.strategy.context import COMPARED
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.table import options_of_techniques
from lightning_amp.verification.training_run import first_of

HERE = ("accelerator=cpu", "devices=1", "num_nodes=1", "logger=false", "fast_dev_run=false")
"""Trainer settings that replace those of another machine, or that would open connections."""


class _Idle(Trainer):
    """A Trainer that accepts all settings, to read a configuration of `fit`, but does not train."""

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Do nothing."""


def read_configuration(path: str) -> tuple[LightningModule, LightningDataModule, dict[str, Any]]:
    """Return module, data module, and the AMPStrategy options of a YAML file; Trainer settings are ignored."""
    # `verify` sets the precision
    module, data, trainer = _read(path, (*HERE, "precision=32-true"))
    return module, data, _options(trainer)


def read_step(path: str, *, values: bool) -> tuple[LightningModule, Any, RunSettings, dict[str, Any]]:
    """Return what a fit of a YAML file has before its first step.

    The result is the module in the file's precision, a batch, settings that affect the step, and AMPStrategy options.
    Layers from `configure_model` are on the meta device, unless `values` is True.
    """
    module, data, trainer = _read(path, HERE)
    run_settings, source = RunSettings.of(trainer, prepared=True, datamodule=data), module if data is None else data
    source.prepare_data()
    if data is not None:
        data.setup("fit")
    module.trainer, trainer.state.fn = trainer, TrainerFn.FITTING
    trainer.datamodule = data  # type: ignore[attr-defined]
    try:
        module.setup("fit")
        with trainer.precision_plugin.module_init_context(), nullcontext() if values else torch.device("meta"):
            module.configure_model()
    except Exception as error:
        raise ModelError(
            f"the training step of {path!r} cannot be read: {type(module).__name__} fails to make its layers"
            f" in `setup` or `configure_model`: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.trainer = None
    module = trainer.precision_plugin.convert_module(module)  # type: ignore[assignment]
    loader = source.train_dataloader()
    try:
        batch = example_batch(loader)
    except DataError:
        # consuming a batch is harmless here, because nothing else reads the loader
        batch = first_of(loader, 1)[0]
    return module, batch, run_settings, _options(trainer)


def _read(path: str, settings: Sequence[str]) -> tuple[LightningModule, LightningDataModule, Trainer]:
    words = ["fit", "--config", path, "--ckpt_path=null", *(f"--trainer.{setting}" for setting in settings)]
    with warnings.catch_warnings():
        # on a CPU, 16-mixed becomes bf16-mixed, which has the same bytes
        warnings.filterwarnings("ignore", message=".*fp16 is not supported on CPU")
        cli = CommandLine(trainer_class=_Idle, save_config_callback=None, args=words)
    return cli.model, cli.datamodule, cli.trainer


def _options(trainer: Trainer) -> dict[str, Any]:
    names = {*COMPARED, *options_of_techniques(), "plan", "device_memory", "on_predicted_oom", "rates", "data_dir"}
    ours = trainer.strategy
    return {name: getattr(ours.request, name) for name in names} if isinstance(ours, AMPStrategy) else {}
