"""The schedule of a pipeline as a picture: ranks by time, forward and backward passes, and what is idle."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lightning_amp.figures import PALETTE, new_figure, save_figure

NUMBERED = 0.012
"""Share of a schedule from which on a pass is wide enough for its number."""


def schedule_chart(
    path: Path,
    *,
    passes: Sequence[Mapping[Any, tuple[float, float]]],
    rest_seconds: float,
    title: str,
) -> None:
    """Draw what every rank of a pipeline computes when; what is left grey is its bubble.

    Args:
        path: PNG to write
        passes: of every rank: whether it is a backward pass, stage and micro-batch -> begin and end in seconds
        rest_seconds: of the last stage's first backward pass, what precedes it for the whole batch
        title: what is run
    """
    end = max(last for rank in passes for _, last in rank.values())
    unit, size = ("s", 1.0) if end >= 1 else ("ms", 1e-3)
    figure = new_figure(10.0, 1.6 + 0.5 * len(passes))
    axes = figure.add_subplot()
    last_stage = max(stage for rank in passes for _, stage, _ in rank)
    rested = rest_seconds == 0
    for row, rank in enumerate(passes):
        axes.barh(row, end / size, color="#e6e6e6", height=0.8, zorder=1)
        for (backward, stage, micro_batch), (begin, stop) in sorted(rank.items(), key=lambda item: item[1]):
            if backward and stage == last_stage and not rested:
                rested = True
                _bar(axes, row, begin / size, rest_seconds / size, PALETTE[2], "")
                begin += rest_seconds
            text = str(micro_batch) if stop - begin >= NUMBERED * end else ""
            _bar(axes, row, begin / size, (stop - begin) / size, PALETTE[1 if backward else 0], text)
    names = [("forward", PALETTE[0]), ("backward", PALETTE[1]), ("idle", "#e6e6e6")]
    names += [("after the blocks", PALETTE[2])] if rest_seconds else []
    for name, colour in names:
        axes.barh(0, 0, color=colour, label=name)
    axes.set(xlabel=f"predicted time ({unit}), micro-batches numbered", title=title)
    axes.set_yticks(range(len(passes)), [f"rank {row}" for row in range(len(passes))])
    axes.set_xlim(0, end / size)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    save_figure(figure, path)


def _bar(axes: Axes, row: int, begin: float, width: float, colour: str, text: str) -> None:
    axes.barh(row, width, left=begin, color=colour, height=0.8, edgecolor="white", linewidth=0.6, zorder=2)
    if text:
        axes.text(
            begin + width / 2, row, text, ha="center", va="center", fontsize=7, color="white", clip_on=True
        )
