"""Bytes against the length of the input, with and without chunks, and the longest input under a fixed budget.

After Figure 1 of AutoChunk. The budget is what eager takes at some length; the longest input is the one whose least
bytes are within it, by the generated forward on fake tensors. A run with values is at the factor that AutoChunk
reports: at the longest input regions run a row or two at a time, and the meter sees every operator.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_amp
from benchmarks.chunks.kinds import MODELS, Model
from benchmarks.chunks.measure import counted, forward
from benchmarks.page import table
from lightning_amp._torch import FakeTensorMode
from lightning_amp.errors import AmpError
from lightning_amp.figures import INK, PALETTE, RED, new_figure, save_figure
from lightning_amp.quantities import format_bytes, format_seconds

STEP = {1: 64, 2: 16}
"""Lengths are multiples of this, for inputs of one dimension and of two."""
PAPER = {1: 11.7, 2: 3.2}
"""How much longer inputs AutoChunk reports."""
LENGTH = {"U-Net with attention": 192}
"""Where eager's bytes are the budget, of models other than at their length: smaller images have little attention."""


def least_bytes(module: nn.Module, args: tuple[Any, ...]) -> int:
    """The least budget that can be met."""
    try:
        return int(lightning_amp.chunk(module, *args, budget=1).plan.peak_bytes)  # type: ignore[union-attr]
    except AmpError as error:
        if not hasattr(error, "least_bytes"):
            raise
        return int(error.least_bytes)


def shapes(model: Model, length: int) -> tuple[torch.Tensor, ...]:
    """Arguments without values."""
    with FakeTensorMode():
        return model.args(length)


@cache
def whole(model: Model, length: int) -> int:
    """Bytes as the model is."""
    module = lightning_amp.chunk(model.build(), *shapes(model, length), budget=2**62)
    return int(module.plan.whole_bytes)  # type: ignore[union-attr]


@cache
def least(model: Model, length: int) -> int:
    """Bytes in chunks."""
    return least_bytes(model.build(), shapes(model, length))


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of one model.

    Attributes:
        length: Of which eager takes the budget.
        longest: Input that chunks can take.
        run: Input that was run.
        n_bytes, operators, seconds: Of that run, in which the meter sees every operator.
    """

    model: Model
    budget: int
    length: int
    longest: int
    run: int
    n_bytes: int
    operators: int
    seconds: float


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
    budget, run = whole(model, length), ceil(PAPER[model.dims] * length / step) * step
    most = longest(model, budget, run)
    module, args = model.build(), model.args(min(run, most))
    small: nn.Module = lightning_amp.chunk(module, *args, budget=budget)
    begin = time.perf_counter()
    n_bytes, operators = counted(forward(small, args))
    return Found(model, budget, length, most, min(run, most), n_bytes, operators, time.perf_counter() - begin)


def lengths(picture: Path | None, *, quick: bool) -> Iterator[str]:
    """The table; and draw the picture, if there is a file for it."""
    found, rows = [find(model, quick=quick) for model in MODELS[: 1 if quick else None]], list[list[str]]()
    for one in found:
        held = "" if one.n_bytes <= one.budget else ", ABOVE the budget"
        ratios = (f"{n / one.length:.1f}x" for n in (one.longest, one.run))
        rows.append(
            [
                *(one.model.name, format_bytes(one.budget), f"{one.length:,}"),
                *(f"{one.longest:,}", next(ratios), f"{one.run:,}", next(ratios)),
                *(f"{format_bytes(one.n_bytes)}{held}", f"{one.operators:,}", format_seconds(one.seconds)),
            ]
        )
    header = ["model", "budget", "eager", "chunks", "ratio", "run at", "ratio", "bytes", "operators", "time"]
    yield from table(header, rows)
    if picture is not None:
        draw(picture, found)


def draw(path: Path, found: Sequence[Found]) -> None:
    """A panel for each model."""
    figure = new_figure(3.3 * len(found), 3.4)
    figure.suptitle("Memory of a forward pass against the length of the input", fontsize=11)
    for place, one in enumerate(found):
        axes = figure.add_subplot(1, len(found), place + 1)
        at = [one.length // 2, one.length, one.longest]
        axes.loglog(at, [whole(one.model, n) for n in at], "o-", color=INK, label="eager")
        axes.loglog(at, [least(one.model, n) for n in at], "^-", color=PALETTE[0], label="chunks, the least")
        axes.plot(one.run, one.n_bytes, "s", color=PALETTE[5], label="chunks, a run")
        axes.axhline(one.budget, linestyle="--", color=RED, linewidth=1, label="budget")
        axes.set_title(one.model.name, fontsize=10)
        axes.set_xlabel("length", fontsize=8)
        axes.set_ylabel("bytes" if not place else "", fontsize=8)
    figure.axes[0].legend(fontsize=7.5, frameon=False)
    save_figure(figure, path)
