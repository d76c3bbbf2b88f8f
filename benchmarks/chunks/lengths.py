"""Bytes against the length of the input, with and without chunks, and the longest input under a fixed budget.

After Figure 1 of AutoChunk. The budget is what eager takes at some length; the longest input is the one whose least
bytes are within it, by the generated forward on fake tensors. A run with values is at the factor that AutoChunk
reports, not at the longest input: there regions run a row or two at a time, and the meter sees every operator.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from torch import nn

import lightning_amp
from benchmarks.chunks.inference import least_bytes
from benchmarks.chunks.measure import count, forward
from benchmarks.chunks.models import MODELS, Model
from benchmarks.page import table
from lightning_amp._torch import FakeTensorMode
from lightning_amp.figures import INK, MARKERS, PALETTE, RED, new_figure, save_figure
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds

STEP = {1: 64, 2: 16}
"""Lengths are multiples of this, for inputs of one dimension and of two."""
PAPER = {1: 11.7, 2: 3.2}
"""How much longer inputs AutoChunk reports."""
LENGTH = {"U-Net with attention": 192}
"""Where eager's bytes are the budget, of models other than at their length: smaller images have little attention."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of one model.

    Attributes:
        length: Of which eager takes the budget.
        longest: Input that chunks can take.
        run: Input that was run.
        n_bytes: Most of that run.
        operators: Of that run.
        seconds: Of that run, in which the meter sees every operator.
    """

    model: Model
    budget: int
    length: int
    longest: int
    run: int
    n_bytes: int
    operators: int
    seconds: float

    @property
    def ratio(self) -> str:
        """Of the longest input to eager's."""
        return f"{self.longest / self.length:.1f}x"

    @property
    def row(self) -> list[str]:
        """Of the table."""
        held = "" if self.n_bytes <= self.budget else ", ABOVE the budget"
        lengths = [f"{self.length:,}", f"{self.longest:,}", self.ratio]
        ran = [f"{self.run:,}", f"{self.run / self.length:.1f}x", f"{format_bytes(self.n_bytes)}{held}"]
        budget = format_bytes(self.budget)
        return [self.model.name, budget, *lengths, *ran, f"{self.operators:,}", format_seconds(self.seconds)]


@cache
def whole_bytes(model: Model, length: int) -> int:
    """As the model is."""
    module = lightning_amp.chunk(model.build(), *shapes(model, length), budget=2**62)
    return int(module.plan.whole_bytes)  # type: ignore[union-attr]


@cache
def least(model: Model, length: int) -> int:
    """In chunks."""
    return least_bytes(model.build(), shapes(model, length))


def shapes(model: Model, length: int) -> tuple[torch.Tensor, ...]:
    """Arguments without values."""
    with FakeTensorMode():
        return model.args(length)


def longest(model: Model, budget: int, start: int) -> int:
    """The longest input within a budget, where bytes grow about as a power of the length; a multiple of a step."""
    tried: dict[int, int] = {}
    n, step = start, STEP[model.dims]
    while n not in tried:
        tried[n] = least(model, n)
        guess = int(n * (budget / tried[n]) ** (1 / model.dims)) // step * step
        below = [k for k, found in tried.items() if found <= budget]
        above = [k for k, found in tried.items() if found > budget]
        n = max(step, min(max(guess, *below, 1), *(k - step for k in above), 2**30))
    return max((k for k, found in tried.items() if found <= budget), default=0)


def find(model: Model, *, quick: bool) -> Found:
    """The longest input of a model; and run one with values, where the longest is no shorter."""
    length, step = model.quick_length if quick else LENGTH.get(model.name, model.length), STEP[model.dims]
    budget, run = whole_bytes(model, length), ceil(PAPER[model.dims] * length / step) * step
    most = longest(model, budget, run)
    module, args = model.build(), model.args(min(run, most))
    small: nn.Module = lightning_amp.chunk(module, *args, budget=budget)
    begin = time.perf_counter()
    n_bytes, operators, _ = count(forward(small, args))
    return Found(model, budget, length, most, min(run, most), n_bytes, operators, time.perf_counter() - begin)


def lengths(picture: Path, *, quick: bool) -> Iterator[str]:
    """The table; and draw the picture."""
    models, found = MODELS[: 1 if quick else None], list[Found]()

    def rows() -> Iterator[list[str]]:
        for model in track(models, description="lengths", total=len(models)):
            found.append(find(model, quick=quick))
            yield found[-1].row

    header = ["model", "budget", "eager", "chunks", "ratio", "run at", "ratio", "bytes", "operators", "time"]
    yield from table(header, rows())
    draw(picture, found)
    yield from [f"![Activation memory against the length of the input]({picture.name})", ""]


def draw(path: Path, found: Sequence[Found]) -> None:
    """A panel for each model."""
    figure = new_figure(3.3 * len(found), 3.4)
    figure.suptitle(
        "Memory of a forward pass against the length of the input: a budget holds longer inputs in chunks",
        fontsize=11,
    )
    for place, one in enumerate(found):
        axes = figure.add_subplot(1, len(found), place + 1)
        _panel(axes, one)
        if place == 0:
            axes.set_ylabel("most bytes of a forward pass", fontsize=8)
            axes.legend(fontsize=7.5, frameon=False, loc="upper left")
    save_figure(figure, path)


def _panel(axes: Axes, found: Found) -> None:
    lengths = [found.length // 2, found.length, found.longest]
    lines = {
        "eager": (INK, [whole_bytes(found.model, n) for n in lengths]),
        "chunks, the least": (PALETTE[0], [least(found.model, n) for n in lengths]),
    }
    for (name, (colour, values)), marker in zip(lines.items(), MARKERS, strict=False):
        axes.plot(lengths, values, marker + "-", color=colour, label=name, markersize=4)
    axes.plot(found.run, found.n_bytes, "s", color=PALETTE[5], label="chunks, a run", markersize=5)
    axes.axhline(found.budget, linestyle="--", color=RED, linewidth=1, label="budget")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_title(f"{found.model.name}: {found.ratio} the length", fontsize=10)
    axes.set_xlabel("length, words" if found.model.dims == 1 else "length of a side", fontsize=8)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: format_bytes(int(n))))
    axes.tick_params(labelsize=7)
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
