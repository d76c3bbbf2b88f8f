"""Draw how contacts decay with the distance of the bins, measured and expected."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_amp.figures import GREY, PALETTE, new_figure, save_figure

NEAR = (0.9, 1.1)
"""Expected contacts over measured ones at a distance that count as right."""


def draw_decay(
    path: Path, distances: Sequence[float], expected: NDArray[np.float64], measured: NDArray[np.float64]
) -> None:
    """Draw contacts of a cell by distance in Mb, [stratum], and the ratio of expected and measured ones."""
    figure = new_figure(9.6, 3.8)
    left, right = figure.subplots(1, 2)
    left.plot(distances, measured, "o-", color=PALETTE[0], ms=4, label="measured")
    left.plot(distances, expected, "--", color=PALETTE[1], label="expected by the model")
    left.set(yscale="log", xlabel="distance (Mb)", ylabel="contacts of a cell, mean")
    left.legend(frameon=False)
    some = measured > 0
    right.axhspan(*NEAR, color="#e6e6e6", label=f"good: {NEAR[0]} to {NEAR[1]}")
    right.axhline(1, color=GREY, lw=0.8)
    right.plot(np.asarray(distances)[some], expected[some] / measured[some], "o-", color=PALETTE[2], ms=4)
    right.set(xlabel="distance (Mb)", ylabel="expected / measured")
    # room above the band for its name
    low, high = right.get_ylim()
    right.set_ylim(low, high + 0.2 * (high - low))
    right.legend(frameon=False, loc="upper right")
    figure.suptitle("Contacts by distance")
    save_figure(figure, path)
