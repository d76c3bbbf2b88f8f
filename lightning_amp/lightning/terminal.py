"""What Lightning shows while it trains, made to fit a terminal of 80 columns and to leave out what says nothing."""

from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn

from lightning_amp.planning.reports.table import table

BAR_WIDTH = 12


class NarrowBar(RichProgressBar):
    """Lightning's bar without times and version: its line of losses stays one line."""

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Epoch, a short bar, and batches."""
        return [TextColumn("{task.description}"), BarColumn(BAR_WIDTH), MofNCompleteColumn()]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Only the losses."""
        found = dict(super().get_metrics(trainer, pl_module))
        found.pop("v_num", None)
        return cast(dict[str, Any], found)


def summarize(
    summary_data: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    **_: Any,
) -> None:
    """Print modules and parameters; FLOPs only where Lightning counted any, for which it needs an example input."""
    columns = {name: values for name, values in summary_data if name != "FLOPs" or total_flops}
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    print(f"\n{table(list(columns), rows)}")
    print(f"{total_parameters:,} parameters, {trainable_parameters:,} of them trained, {model_size:.3g} MB\n")


def fit_the_terminal(trainer: Trainer) -> None:
    """Let Lightning's own callbacks show this; what a person has written stays as it is."""
    for i, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
        if type(callback) is RichProgressBar:
            trainer.callbacks[i] = NarrowBar()  # type: ignore[attr-defined]
        elif type(callback) in (ModelSummary, RichModelSummary):
            callback.summarize = summarize
