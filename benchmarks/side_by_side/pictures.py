"""Pictures of the comparison: memory against K and N, time and memory against B, what ranks hold and send."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from benchmarks.side_by_side.cases import (
    CHECKPOINT,
    EAGER,
    OURS_ALONE,
    OURS_NODES,
    OURS_STRATA,
    PAPER_ALONE,
    PAPER_RANKS,
    Case,
    Method,
    Size,
)
from benchmarks.side_by_side.goals import GIB, Results
from benchmarks.side_by_side.suite import SPLIT
from lightning_amp.figures import DPI, GREY, INK, MARKERS, PALETTE

Curve = Mapping[float, float]
STYLES = {
    EAGER: (INK, MARKERS[0]),
    CHECKPOINT: (PALETTE[1], MARKERS[1]),
    PAPER_ALONE: (PALETTE[3], MARKERS[2]),
    PAPER_RANKS: (PALETTE[3], MARKERS[2]),
    OURS_ALONE: (PALETTE[0], MARKERS[3]),
    OURS_STRATA: (PALETTE[0], MARKERS[3]),
    OURS_NODES: (PALETTE[2], MARKERS[4]),
}
LEAST_TICKS = 3
STRATA, ANCHORS, CELLS, RANKS = (
    f"benchmarks_{name}.png" for name in ("memory_strata", "memory_anchors", "cells", "ranks")
)


def draw_all(folder: Path, results: Results) -> None:
    """Write the four PNGs.

    Args:
        folder: Where to.
        results: What was found.
    """
    suite = results.suite
    memory_against(
        folder / STRATA,
        results,
        suite.simulated_by_strata(),
        lambda size: size.strata,
        label="strata K",
        title=f"One device, N {suite.simulated.anchors:,}, D {suite.simulated.dim}, B {suite.simulated.cells}",
    )
    memory_against(
        folder / ANCHORS,
        results,
        suite.simulated_by_anchors(),
        lambda size: size.anchors,
        label="anchors N",
        title=f"One device, K {suite.simulated.strata}, D {suite.simulated.dim}, B {suite.simulated.cells}",
    )
    _cells(folder / CELLS, results)
    _ranks(folder / RANKS, results)


def memory_against(
    path: Path, results: Results, sizes: Sequence[Size], value: Callable[[Size], float], *, label: str, title: str
) -> None:
    """Simulated peaks of one device, on logarithmic axes.

    Args:
        path: PNG to write.
        results: What was found.
        sizes: Sizes that were simulated.
        value: What varies between them.
        label: Its name.
        title: What stays the same.
    """
    figure, (axes,) = _figure(1)
    for method in results.suite.simulated_methods:
        found = {value(size): results.simulation(Case(size=size, method=method)) for size in sizes}
        _curve(axes, method, {x: s.peak_bytes / GIB for x, s in found.items() if s is not None})
    _finish(axes, [value(size) for size in sizes], label, "simulated peak of a step (GiB)", title)
    _save(figure, path)


def _cells(path: Path, results: Results) -> None:
    suite = results.suite
    figure, panels = _figure(2)
    for method in (EAGER, OURS_ALONE):
        found = {size.cells: results.of(suite.alone(size, method)) for size in suite.varied_cells()}
        ran = {x: m for x, m in found.items() if m is not None}
        _curve(panels[0], method, {x: m.seconds for x, m in ran.items()})
        _curve(panels[1], method, {x: m.peak_bytes / GIB for x, m in ran.items()})
    places = [size.cells for size in suite.varied_cells()]
    what = f"N {suite.base.anchors:,}, K {suite.base.strata}, D {suite.base.dim}, 2 threads"
    _finish(panels[0], places, "cells B", "forward + backward (s)", what, legend=False)
    _finish(panels[1], places, "cells B", "memory above start (GiB)", what)
    _save(figure, path)


def _ranks(path: Path, results: Results) -> None:
    suite, size = results.suite, results.suite.split
    figure, panels = _figure(2)
    one = results.simulation(Case(size=size, method=OURS_ALONE))
    for method in SPLIT:
        found = {r: results.simulation(Case(size=size, method=method, ranks=r)) for r in suite.ranks}
        ran = {x: s for x, s in found.items() if s is not None}
        _curve(panels[0], method, {x: s.peak_bytes / GIB for x, s in ran.items()})
        _curve(panels[1], method, {x: s.sent_bytes / GIB for x, s in ran.items()})
    if one is not None:
        panels[0].axhline(one.peak_bytes / GIB, color=GREY, linestyle=":", label=OURS_ALONE.name)
    what = f"{size}, D {size.dim}"
    _finish(panels[0], suite.ranks, "ranks", "simulated peak per rank (GiB)", what)
    _finish(panels[1], suite.ranks, "ranks", "handed to collectives per rank (GiB)", what, legend=False)
    _save(figure, path)


def _curve(axes: Axes, method: Method, points: Curve) -> None:
    if not points:
        return
    colour, marker = STYLES[method]
    axes.plot(list(points), list(points.values()), f"{marker}-", color=colour, label=method.name)


def _finish(axes: Axes, places: Sequence[float], label: str, what: str, title: str, *, legend: bool = True) -> None:
    axes.set(xlabel=label, ylabel=what)
    axes.set_title(title, fontsize=10)
    if not axes.lines:
        return
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    low, high = axes.get_ylim()
    if sum(low <= tick <= high for tick in axes.get_yticks()) < LEAST_TICKS:
        axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    if legend:
        axes.figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )


def _figure(n: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(6.4 if n == 1 else 9.6, 4.4), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, n, i + 1) for i in range(n)]


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.1)
