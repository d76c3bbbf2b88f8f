"""Bytes against the length of the input, with and without chunks, and the longest input under a fixed budget.

After Figure 1 of AutoChunk. Bytes are those of a run without values; the longest inputs are those that
`lightning_amp.chunk` accepts, and one of each model is run.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import nn

import lightning_amp
from benchmarks.chunks.inference import least_bytes
from benchmarks.chunks.measure import count, forward
from benchmarks.chunks.models import MODELS, Model
from benchmarks.page import table
from lightning_amp._torch import FakeTensorMode
from lightning_amp.errors import PlanError
from lightning_amp.figures import DPI, INK, MARKERS, PALETTE
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds

LARGE = 2**28
STEP = {1: 64, 2: 16}
"""Lengths are multiples of this, for inputs of one dimension and of two."""
FACTORS = (0.5, 1, 2, 4)
"""Lengths of the picture, of that of the model."""


@cache
def ends(model: Model, length: int) -> tuple[int, int]:
    """Bytes as the model is, and the least that chunks can take."""
    module, args = model.build(), shapes(model, length)
    whole: int = lightning_amp.chunk(module, *args, budget=2**62).plan.whole_bytes  # type: ignore[union-attr]
    return whole, least_bytes(module, args)


def shapes(model: Model, length: int) -> tuple[torch.Tensor, ...]:
    """Arguments without values."""
    with FakeTensorMode():
        return model.args(length)


def longest(bytes_at: Callable[[int], int], budget: int, start: int, step: int, power: int) -> int:
    """The longest input within a budget, where bytes grow about as a power of the length; a multiple of `step`."""
    tried: dict[int, int] = {}
    n = start
    while n not in tried:
        tried[n] = bytes_at(n)
        guess = int(n * (budget / tried[n]) ** (1 / power)) // step * step
        below = [k for k, found in tried.items() if found <= budget]
        above = [k for k, found in tried.items() if found > budget]
        n = max(step, min(max(guess, *below, 1), *(k - step for k in above), 2**30))
    return max((k for k, found in tried.items() if found <= budget), default=0)


def rows_of(model: Model, *, quick: bool) -> Iterator[list[str]]:
    """What eager takes now as the budget, with a real run; and a large budget."""
    length, step = model.quick_length if quick else model.length, STEP[model.dims]
    for budget in (ends(model, length)[0], LARGE):
        bare = longest(lambda n: ends(model, n)[0], budget, length, step, 2 * model.dims)
        cut = longest(lambda n: ends(model, n)[1], budget, length, step, model.dims)
        while not fits(model, cut, budget):
            cut -= max(step, cut // 64 // step * step)
        run = real_run(model, cut, budget) if budget != LARGE else "not run"
        yield [model.name, format_bytes(budget), f"{bare:,}", f"{cut:,}", f"{cut / bare:.1f}x", run]


def fits(model: Model, length: int, budget: int) -> bool:
    """Whether a plan is found, by what the generated forward takes on fake tensors."""
    try:
        lightning_amp.chunk(model.build(), *shapes(model, length), budget=budget)
    except PlanError:
        return False
    return True


def real_run(model: Model, length: int, budget: int) -> str:
    """Bytes and seconds of one run."""
    module, args = model.build(), model.args(length)
    small: nn.Module = lightning_amp.chunk(module, *args, budget=budget)
    begin = time.perf_counter()
    found = count(forward(small, args))[0]
    held = "" if found <= budget else ", ABOVE the budget"
    return f"{format_bytes(found)}{held}, {format_seconds(time.perf_counter() - begin)}"


def lengths(picture: Path, *, quick: bool) -> Iterator[str]:
    """The table; and draw the picture."""
    models = MODELS[: 1 if quick else None]
    each = track(models, description="lengths", total=len(models))
    header = ["model", "budget", "eager", "chunks", "ratio", "run with chunks"]
    yield from table(header, (row for model in each for row in rows_of(model, quick=quick)))
    draw(picture, models, quick=quick)
    yield from [f"![Activation memory against the length of the input]({picture.name})", ""]


def draw(path: Path, models: tuple[Model, ...], *, quick: bool) -> None:
    """A panel for each model."""
    figure = Figure(figsize=(3.4 * len(models), 3.2), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for place, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), place + 1)
        length = model.quick_length if quick else model.length
        _panel(axes, model, [int(length * factor) for factor in FACTORS])
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.1)


def _panel(axes: Axes, model: Model, lengths: list[int]) -> None:
    found = [ends(model, n) for n in lengths]
    lines = (
        ("eager", INK, [whole for whole, _ in found]),
        ("chunks, the least", PALETTE[0], [b for _, b in found]),
    )
    for (name, colour, values), marker in zip(lines, MARKERS, strict=False):
        axes.plot(lengths, values, marker + "-", color=colour, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(model.name, fontsize=9)
    axes.set_xlabel("length" if model.dims == 1 else "side", fontsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: format_bytes(int(n))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False)
