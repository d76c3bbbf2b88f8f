"""The picture of growth: seconds against what grows, small panels with one legend, and where methods begin to pay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, StrMethodFormatter

from lightning_amp.figures import DPI, GREY, INK, MARKERS, PALETTE
from lightning_amp.quantities import format_seconds

Points = Mapping[float, float]
PLAIN = "plain"
STYLES = {
    "plain": (INK, MARKERS[0], "-"),
    "ddp": (PALETTE[1], MARKERS[1], "-"),
    "paper": (PALETTE[3], MARKERS[2], "-"),
    "auto": (PALETTE[0], MARKERS[3], "-"),
    "auto, one process": (PALETTE[0], MARKERS[4], "--"),
}
MARGIN = 0.98
"""Of plain Lightning's time: what is less is faster, and not only the noise of a measurement."""
LEAST_TICKS = 3
TICKS = ((1,), (1, 2, 5), (1, 2, 3, 4, 6, 8), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9))
NARROW = 0.15
"""Decades of time below which an axis would show noise as if it were growth."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Seconds of methods against one size.

    Attributes:
        label: what grows
        what: of which the seconds are
        title: what stays the same
        curves: name of a method -> size -> seconds
        whole: whether nothing lies between the sizes, so that a method begins to pay at one of them
    """

    label: str
    what: str
    title: str
    curves: Mapping[str, Points]
    whole: bool = False

    def begins(self, name: str) -> list[tuple[float, float]]:
        """Where a method begins to be faster than plain Lightning, and its seconds there."""
        points = self.curves[name]
        return crossings(points, self.plain(points), whole=self.whole)

    def plain(self, points: Points) -> Points:
        """Seconds of plain Lightning at these sizes, as far as there are; its one rank is compared with any number."""
        found = self.curves[PLAIN]
        if self.whole:
            return {x: seconds for seconds in found.values() for x in points}
        return {x: found[x] for x in points if x in found}


def crossings(points: Points, plain: Points, *, whole: bool = False) -> list[tuple[float, float]]:
    """Where a method that was not faster begins to be, and its seconds there, interpolated on logarithmic axes; if
    `whole`, the first size at which it is."""
    found = []
    for a, b in pairwise(sorted(plain)):
        before, after = (log(points[x] / plain[x]) for x in (a, b))
        if before < 0 or after >= log(MARGIN):
            continue
        part = 1.0 if whole else before / (before - after)
        x, y = ((1 - part) * log(u) + part * log(v) for u, v in ((a, b), (points[a], points[b])))
        found.append((exp(x), exp(y)))
    return found


def draw(path: Path, panels: Sequence[Panel], legend: Mapping[str, str]) -> None:
    """Draw all panels, the legend in the last place.

    Args:
        path: PNG to write
        panels: an odd number of them
        legend: name of a method -> what it is in words
    """
    columns = (len(panels) + 1) // 2
    figure = Figure(figsize=(4.0 * columns, 7.0), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels):
        # the last place of the first row is the legend's
        _panel(figure.add_subplot(2, columns, place + 1 + (place >= columns - 1)), panel)
    handles = [_handle(name, text) for name, text in legend.items() if any(name in p.curves for p in panels)]
    handles.append(_ring("from here on faster than\nplain Lightning", GREY))
    corner = figure.add_subplot(2, columns, columns)
    corner.axis("off")
    corner.legend(handles=handles, loc="center", frameon=False, fontsize=10, labelspacing=1.1)
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.1)


def _panel(axes: Axes, panel: Panel) -> None:
    for name, points in panel.curves.items():
        colour, marker, line = STYLES[name]
        if name == PLAIN and panel.whole and points:
            axes.axhline(next(iter(points.values())), color=colour, linestyle=":", linewidth=1.4)
        axes.plot(list(points), list(points.values()), marker + line, color=colour, markersize=5)
    for name in panel.curves:
        if name != PLAIN:
            _mark(axes, STYLES[name][0], panel.begins(name))
    _finish(axes, panel)


def _mark(axes: Axes, colour: str, found: Sequence[tuple[float, float]]) -> None:
    for x, y in found:
        axes.plot([x], [y], "o", markersize=12, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.8)
        axes.annotate(
            f"{x:,.0f}",
            (x, y),
            (0, -19),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel(panel.label)
    axes.set_title(f"time of {panel.what}\n{panel.title}", fontsize=10)
    places = sorted({x for points in panel.curves.values() for x in points})
    if not places:
        return
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    low, high = axes.get_ylim()
    spare = max(0.0, NARROW - log(high / low, 10)) / 2 + 0.06
    low, high = low / 10**spare, high * 10**spare
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(_ticks(low, high))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _short(seconds)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)


def _ticks(low: float, high: float) -> LogLocator:
    """The fewest round numbers that say what an axis is."""
    for subs in TICKS:
        locator = LogLocator(subs=subs)
        if sum(low <= tick <= high for tick in locator.tick_values(low, high)) >= LEAST_TICKS:
            break
    return locator


def _short(seconds: float) -> str:
    """A tick: as few digits as it needs."""
    number, unit = format_seconds(seconds).split()
    return f"{float(number):g} {unit}"


def _handle(name: str, text: str) -> Line2D:
    colour, marker, line = STYLES[name]
    return Line2D([], [], color=colour, marker=marker, linestyle=line, label=text, markersize=6)


def _ring(text: str, colour: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker="o", markersize=12, markerfacecolor="none", color=colour, label=text)
