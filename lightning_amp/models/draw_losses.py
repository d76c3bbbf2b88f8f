"""Draw the losses of a training by epoch: the loss, the data terms, the divergences and the adversary's term."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lightning_amp.figures import GREY, PALETTE, new_figure, save_figure

PANELS: dict[str, str | tuple[str, ...]] = {
    "loss": ("train_loss", "val_loss"),
    "data terms": "nll_",
    "divergences": "kl_",
    "adversary": "alignment",
}
"""Heading -> names of columns, or how they begin without "train_"."""
LOGARITHMIC = 20
"""From this ratio of the largest and the smallest value on, an axis is logarithmic."""


def draw_losses(path: Path, history: pd.DataFrame) -> None:
    """Draw a table of losses with a row for each epoch, as `history` of a model; columns that are absent stay out."""
    shown = {heading: _columns(history, wanted) for heading, wanted in PANELS.items()}
    shown = {heading: columns for heading, columns in shown.items() if columns}
    n_rows = -(-len(shown) // 2)
    figure = new_figure(9.6, 3.2 * n_rows)
    panels = figure.subplots(n_rows, min(2, len(shown)), squeeze=False).ravel()
    for axes, (heading, columns) in zip(panels, shown.items(), strict=False):
        _draw(axes, history, columns)
        axes.set_title(heading, fontsize=11)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    modalities = sum(name.startswith("train_kl_") and name != "train_kl_graph" for name in history)
    if "adversary" in shown and modalities > 1:
        axes = panels[list(shown).index("adversary")]
        axes.axhline(np.log(modalities), color=GREY, ls=":", label="modalities cannot be told apart")
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(f"Losses of {len(history)} epochs")
    save_figure(figure, path)


def _columns(history: pd.DataFrame, wanted: str | tuple[str, ...]) -> list[str]:
    if isinstance(wanted, tuple):
        return [name for name in wanted if name in history]
    return [name for name in history if name.startswith(f"train_{wanted}")]


def _draw(axes: Axes, history: pd.DataFrame, columns: list[str]) -> None:
    for name, colour in zip(columns, PALETTE, strict=False):
        # an epoch without a validation has no value: the line goes on
        values = history[name].dropna()
        label = {"train_loss": "training", "val_loss": "held-out cells, without adversary"}.get(
            name, name.removeprefix("train_")
        )
        axes.plot(values.index, values, color=colour, label=label, marker="o" if len(values) < 10 else None, ms=3)
    lowest, highest = history[columns].min().min(), history[columns].max().max()
    if lowest > 0 and highest > LOGARITHMIC * lowest:
        axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e6e6")
    axes.legend(frameon=False, fontsize=9)
