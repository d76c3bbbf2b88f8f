"""Model, data module and plan of a configuration of `lightning-amp fit`, without a run."""

import warnings
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_amp.lightning.command_line import CommandLine
from lightning_amp.lightning.strategy.same_plan import COMPARED
from lightning_amp.lightning.strategy.strategy import AMPStrategy

HERE = (
    "accelerator=cpu",
    "devices=1",
    "num_nodes=1",
    "precision=32-true",
    "logger=false",
    "fast_dev_run=false",
)
"""Settings of the Trainer that are another machine's, or open connections."""


class _Idle(Trainer):
    """Takes every setting of a Trainer, so that a configuration of `fit` is read as it is, and trains nothing."""

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
    """Module, data module, and what the YAML file asks of AMPStrategy."""
    words = ["fit", "--config", path, *(f"--trainer.{setting}" for setting in HERE)]
    with warnings.catch_warnings():
        # the words of this command are there too
        warnings.filterwarnings("ignore", message=".*both args and command line")
        cli = CommandLine(trainer_class=_Idle, save_config_callback=None, args=words)
    return cli.model, cli.datamodule, _options(cli.trainer.strategy)


def _options(strategy: object) -> dict[str, Any]:
    if not isinstance(strategy, AMPStrategy):
        return {}
    names = [*COMPARED, "plan", "device_memory", "rates", "data_dir", "micro_batches", "schedule"]
    return {name: getattr(strategy.request, name) for name in names}
