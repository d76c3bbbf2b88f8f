"""Draw all figures: memory per stratum and over a step, embedding of cells, contact maps.

The figures use matplotlib's object interface, which needs no window system and no global state, so they can be drawn
on any rank and in any notebook. They are saved as PNG at 150 dots per inch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

DPI = 150
INK, GREY, RED = "#222222", "#8a8a8a", "#c1272d"
NO_DATA = "#d9d9d9"
# Okabe and Ito's colours, which are safe for colour-blind readers. More classes use ten dark colours, then the same in
# a light tone, with another marker after each ten: a small marker alone is hard to see.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = ("o", "^", "s", "D", "v", "P")
BUDGET_IN_SIGHT = 20
ROOM_ABOVE = 1.05
COLOUR_RANGE, COLOUR_TOP = 1_000, 0.98
MAP_TICKS = 6
LEGEND_ROWS = 18
LEGEND_LETTERS = 24
HOLDERS = 10
NAME_LETTERS = 26
SHORT_PHASE = 0.03


def memory_curve(
    path: Path,
    *,
    predicted_bytes: Sequence[float] | None,
    measured_bytes: Sequence[float] | None,
    budget_bytes: float | None,
    title: str,
    rank_label: str,
) -> None:
    """Draw peak memory against the stratum, predicted and measured, and the budget if it is near the data.

    Args:
        predicted_bytes: [stratum], or None when nothing was predicted
        measured_bytes: [stratum], or None when nothing was measured
        budget_bytes: memory that may be used; beyond 20 times the data only the legend shows it
    """
    # the prediction is drawn last and thin: a good one covers the measurement, which must stay visible
    curves = [
        (measured_bytes, f"measured, {rank_label}", "-", PALETTE[0], 3.2),
        (predicted_bytes, "predicted", "--", PALETTE[1], 1.6),
    ]
    figure, _ = _draw_strata(curves, budget_bytes=budget_bytes, title=title)
    save_figure(figure, path)


def simulated_memory(
    path: Path,
    *,
    simulated_bytes: Sequence[float],
    predicted_bytes: Sequence[float],
    peak_bytes: float,
    failed_at: str | None,
    budget_bytes: float | None,
    title: str,
    rank_label: str,
) -> None:
    """Draw memory after each stratum of a simulated step with the prediction, its peak, and the budget.

    Args:
        simulated_bytes: [stratum], up to where the step stopped; NaN for strata of other ranks
        predicted_bytes: [stratum]
        peak_bytes: most bytes alive at once; if the budget was exceeded, the bytes alive and requested there
        failed_at: where the budget was exceeded; None if it was not
        budget_bytes: memory that may be used; beyond 20 times the data only the legend shows it
    """
    curves = [
        (simulated_bytes, f"simulated, {rank_label}", "o-", PALETTE[0], 2.4),
        (predicted_bytes, "predicted", "--", PALETTE[1], 1.6),
    ]
    figure, axes = _draw_strata(curves, budget_bytes=budget_bytes, title=title, also_bytes=peak_bytes)
    unit, size = _unit(max([peak_bytes, *simulated_bytes, *predicted_bytes]))
    if failed_at is None:
        label = f"peak of the step {peak_bytes / size:.3g} {unit}"
        axes.axhline(peak_bytes / size, linestyle=":", color=PALETTE[0], linewidth=1.4, label=label)
    else:
        label = "\n".join(wrap(f"out of memory at {failed_at}", LEGEND_LETTERS))
        last = (len(simulated_bytes) - 0.5, peak_bytes / size)
        axes.plot(*last, "X", color=RED, markersize=9, linestyle="none", label=label, clip_on=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    save_figure(figure, path)


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """Memory over one training step.

    Attributes:
        phases: [stretch], phase of the step, such as the forward pass.
        lengths: [stretch], number of operators.
        by_kind: kind -> [stretch] bytes.
        holders: module -> kind -> bytes at the peak, largest module first.
    """

    phases: Sequence[str]
    lengths: Sequence[int]
    by_kind: Mapping[str, Sequence[int]]
    holders: Mapping[str, Mapping[str, int]]

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes of all kinds, [stretch]."""
        found: NDArray[np.int64] = np.array(list(self.by_kind.values()), dtype=np.int64).sum(0)
        return found

    @property
    def edges(self) -> NDArray[np.float64]:
        """Start of each stretch as a share of the step, and 1: [stretch + 1]."""
        found: NDArray[np.float64] = np.cumsum([0, *self.lengths]) / sum(self.lengths)
        return found

    @property
    def begins(self) -> dict[float, str]:
        """Start of each phase as a share of the step; short phases, such as those of hooks, are left out."""
        firsts = [k for k, phase in enumerate(self.phases) if k == 0 or phase != self.phases[k - 1]]
        edges = [*(float(self.edges[k]) for k in firsts), 1.0]
        long = (k for k in range(len(firsts)) if edges[k + 1] - edges[k] >= SHORT_PHASE)
        return {edges[k]: self.phases[firsts[k]] for k in long}


def step_memory(
    path: Path, step: StepCurve, *, predicted: StepCurve | None, at: str, budget_bytes: float | None, title: str
) -> None:
    """Draw memory over a training step as an area by kind, and next to it the modules that hold most at the peak.

    Args:
        predicted: the same step, predicted before it was run, drawn as a line and as marks
        at: where in the step the peak is
        budget_bytes: memory that may be used; beyond 20 times the data only the legend shows it
    """
    top = max(int(one.total.max()) for one in (step, predicted) if one is not None)
    unit, size = _unit(top)
    figure = new_figure(9.6, 4.0)
    over_time, next_to = figure.subplots(1, 2, width_ratios=[2, 1])
    areas = [np.r_[values, values[-1]] / size for values in map(list, step.by_kind.values())]
    over_time.stackplot(step.edges, areas, labels=list(step.by_kind), colors=PALETTE, step="post", alpha=0.85)
    for place in [*step.begins][1:]:
        over_time.axvline(place, color=GREY, linewidth=0.8, linestyle=":")
    over_time.set_xticks([*step.begins], [*step.begins.values()], ha="left")
    if predicted is not None:
        own, its, edges = predicted.begins, step.begins, predicted.edges
        if [*own.values()] == [*its.values()]:
            # align the phases with the measured ones, and interpolate within a phase: on fake tensors an optimizer runs
            # other operators
            edges = np.interp(edges, [*own, 1.0], [*its, 1.0])
        over_time.stairs(predicted.total / size, edges, color=INK, ls="--", lw=1.2, label="predicted")
    _draw_budget(over_time, budget_bytes, top=top, size=size)
    over_time.set(xlabel="operators of one step, one after the other", ylabel=f"memory ({unit})", xlim=(0, 1))
    over_time.set_ylim(0, max(1.16 * top / size, over_time.get_ylim()[1]))
    where = int(step.total.argmax())
    place, peak = step.edges[where : where + 2].mean(), step.total[where] / size
    side = "left" if place < 0.3 else "right" if place > 0.7 else "center"
    text, style = f"{peak:.3g} {unit}: {at}", {"ha": side, "va": "bottom", "fontsize": 9}
    over_time.plot(place, peak, "v", color=INK, markersize=6)
    over_time.annotate(text, (place, peak), (0, 6), textcoords="offset points", **style)
    _draw_holders(next_to, step, predicted, unit=unit, size=size)
    figure.legend(*over_time.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    save_figure(figure, path)


def embedding(
    path: Path,
    *,
    xy: ArrayLike,
    labels: Mapping[str, Sequence[str]],
    title: str,
    axis_names: tuple[str, str] = ("dimension 1", "dimension 2"),
) -> None:
    """Draw an embedding of cells, one panel for each kind of label, side by side.

    Args:
        xy: [cell, 2]
        labels: heading of a panel -> class of every cell
        axis_names: labels of the two axes
    """
    points = np.asarray(xy, dtype=np.float64)
    # add the width of the legend, so that each panel stays square
    width = 0.0
    for classes in labels.values():
        names = {str(name) for name in classes}
        width += 4.4 - (-len(names) // LEGEND_ROWS) * (0.5 + 0.085 * max(map(len, names), default=0))
    figure = new_figure(width, 4.6)
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    for axes, (heading, classes) in zip(panels, labels.items(), strict=True):
        _scatter(axes, points, np.asarray(classes).astype(str))
        axes.set_title(heading, fontsize=11)
        axes.set(xlabel=axis_names[0], ylabel=axis_names[1])
    figure.suptitle(title)
    save_figure(figure, path)


def contact_maps(
    path: Path,
    *,
    rows: Mapping[str, Mapping[str, ArrayLike]],
    chromosomes: Sequence[str],
    starts: Sequence[int],
    title: str,
) -> None:
    """Draw contact maps in rows on one logarithmic colour scale: white without contacts, grey without data.

    Args:
        rows: name of a row, or "" -> heading -> [bin, bin] contacts, NaN where there are no data; rows are equally long
        chromosomes: chromosome of each bin; bins of a chromosome are consecutive
        starts: start of each bin, in base pairs
    """
    values = [
        (name, heading, np.asarray(contacts, dtype=np.float64))
        for name, maps in rows.items()
        for heading, contacts in maps.items()
    ]
    # from a large value of all maps down to the smallest, but over a factor of COLOUR_RANGE (1,000) at most; not from
    # the largest: the main diagonal may have a hundred times as many contacts as the others, which would stay white
    scale, positive = LogNorm(0.1, 1.0), np.concatenate([found[found > 0] for *_, found in values])
    if len(positive):
        top = float(np.quantile(positive, COLOUR_TOP, method="higher"))
        scale = LogNorm(min(max(float(positive.min()), top / COLOUR_RANGE), top / 2), top)
    n_columns = len(values) // len(rows)
    figure = new_figure(4.6 * n_columns + 0.6, 4.7 * len(rows))
    panels = figure.subplots(len(rows), n_columns, squeeze=False)
    colours = colormaps["Reds"].with_extremes(under="white", bad=NO_DATA)
    for axes, (name, heading, contacts) in zip(panels.ravel(), values, strict=True):
        # a logarithmic scale would mask zeros like missing data
        shown = np.ma.masked_invalid(np.where(contacts == 0, (scale.vmin or 1.0) / 2, contacts))
        image = axes.imshow(shown, cmap=colours, norm=scale, interpolation="nearest")
        axes.set_title(f"{name}: {heading}" if name else heading, fontsize=11)
        _name_bins(axes, np.asarray(chromosomes), np.asarray(starts))
    figure.colorbar(image, ax=panels, shrink=0.8 / len(rows), label="contacts", extend="max")
    if any(np.isnan(contacts).any() for *_, contacts in values):
        figure.legend(handles=[Patch(color=NO_DATA, label="no data")], loc="lower right", frameon=False)
    figure.suptitle(title)
    save_figure(figure, path)


def _name_bins(axes: Axes, chromosomes: NDArray[Any], starts: NDArray[Any]) -> None:
    """Label a few bins with megabases, put the chromosomes' names outside, and draw lines between chromosomes."""
    # first bin of each chromosome
    first = np.flatnonzero(np.r_[True, chromosomes[1:] != chromosomes[:-1]])
    ends = np.r_[first[1:], len(chromosomes)]
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color=GREY, linewidth=0.8)
        axes.axvline(end - 0.5, color=GREY, linewidth=0.8)
    per_chromosome = max(1, MAP_TICKS // len(first))
    ticks = np.concatenate(
        [np.arange(a, b, _round_up((b - a) / per_chromosome)) for a, b in zip(first, ends, strict=True)]
    )
    labels = [f"{starts[tick] / 1e6:g}" for tick in ticks]
    centres, names = (first + ends - 1) / 2, [f"{chromosomes[a]} (Mb)" for a in first]
    axes.set_xticks(ticks, labels, fontsize=8)
    axes.set_yticks(ticks, labels, fontsize=8)
    below = axes.secondary_xaxis(-0.07)
    next_to = axes.secondary_yaxis(-0.1)
    below.set_xticks(centres, names, fontsize=9)
    next_to.set_yticks(centres, names, fontsize=9, rotation=90, va="center")
    for outer in (below, next_to):
        outer.tick_params(length=0)
        outer.spines[:].set_visible(False)


def _round_up(n: float) -> int:
    """Return the least of 1, 2, 5, 10, 20, 50, ... that is not below n."""
    powers = (int(10**power) for power in range(12))
    return next(unit * power for power in powers for unit in (1, 2, 5) if unit * power >= n)


def _draw_holders(axes: Axes, step: StepCurve, predicted: StepCurve | None, *, unit: str, size: float) -> None:
    """Draw a stacked bar for each of the largest modules at the peak, and a mark at its predicted total."""
    names = list(step.holders)[:HOLDERS]
    left = np.zeros(len(names))
    for kind, colour in zip(step.by_kind, PALETTE, strict=False):
        values = np.array([step.holders[name][kind] for name in names]) / size
        axes.barh(range(len(names)), values, left=left, color=colour, alpha=0.85)
        left += values
    if predicted is not None:
        marks = [sum(predicted.holders.get(name, {}).values()) / size for name in names]
        axes.plot(marks, range(len(names)), "|", color=INK, markersize=12, markeredgewidth=1.6)
    short = [name if len(name) <= NAME_LETTERS else f"...{name[3 - NAME_LETTERS :]}" for name in names]
    axes.set_yticks(range(len(names)), [name or "(the module itself)" for name in short], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=f"at the peak ({unit})")
    axes.set_title("modules that hold most", fontsize=10)


def _draw_strata(
    curves: Sequence[tuple[Sequence[float] | None, str, str, str, float]],
    *,
    budget_bytes: float | None,
    title: str,
    also_bytes: float = 1.0,
) -> tuple[Figure, Axes]:
    """Draw memory against the stratum: values, label, line, colour and width of each curve, and the budget."""
    top = max([also_bytes, *(float(np.nanmax(values)) for values, *_ in curves if values is not None and len(values))])
    unit, size = _unit(top)
    figure = new_figure(7.0, 4.2)
    axes = figure.add_subplot()
    for values, label, line, colour, width in curves:
        if values is not None and len(values):
            y = np.asarray(values, dtype=np.float64) / size
            axes.plot(np.arange(len(y)), y, line, color=colour, label=label, linewidth=width, markersize=4)
    _draw_budget(axes, budget_bytes, top=top, size=size)
    axes.set(xlabel="stratum", ylabel=f"memory ({unit})", title=title)
    axes.set_ylim(0, max(ROOM_ABOVE * top / size, axes.get_ylim()[1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure, axes


def _draw_budget(axes: Axes, budget_bytes: float | None, *, top: float, size: float) -> None:
    if budget_bytes is None:
        return
    own_unit, own_size = _unit(budget_bytes)
    label = f"budget {budget_bytes / own_size:.3g} {own_unit}"
    if budget_bytes <= BUDGET_IN_SIGHT * top:
        axes.axhline(budget_bytes / size, linestyle="--", color=RED, linewidth=1.4, label=label)
    else:
        axes.plot([], [], " ", label=f"{label}\n(far above)")


def _scatter(axes: Axes, points: NDArray[np.float64], classes: NDArray[np.str_]) -> None:
    names, codes = np.unique(classes, return_inverse=True)
    size = 34 if len(points) < 300 else 12
    order = np.random.default_rng(0).permutation(len(points))  # otherwise the class drawn last would hide the others
    tones = np.array(PALETTE)
    if len(names) > len(PALETTE):
        tones = np.array([to_hex(colour) for colour in colormaps["tab20"](range(20))]).reshape(10, 2).T.ravel()
    colours = tones[np.arange(len(names)) % len(tones)]
    markers = np.array(MARKERS)[np.arange(len(names)) // 10 % len(MARKERS)]
    for marker in MARKERS:
        mine = order[markers[codes[order]] == marker]
        x, y = points[mine].T
        axes.scatter(x, y, c=colours[codes[mine]], marker=marker, s=size, linewidths=0, alpha=0.8)
    for name, colour, marker in zip(names, colours, markers, strict=True):
        axes.scatter([], [], color=colour, marker=marker, s=size, label=name)
    # distances in an embedding have the same meaning along both axes
    axes.set_aspect("equal", adjustable="datalim")
    axes.set(xticks=[], yticks=[])
    n_columns = -(-len(names) // LEGEND_ROWS)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, ncols=n_columns)


def _unit(n_bytes: float) -> tuple[str, int]:
    """Return a readable unit for a number of bytes, and its size in bytes."""
    fitting = [(unit, 2**power) for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if n_bytes >= 2**power]
    return fitting[0] if fitting else ("bytes", 1)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height are in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure as PNG."""
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.1)
