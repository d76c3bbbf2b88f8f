"""Answers to "what if" and a recommendation of devices as text of at most 80 columns."""

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from lightning_amp.data.files.resolution import format_resolution
from lightning_amp.planning.questions.recommend_devices import WORTH, Recommendation, Scale, ratio
from lightning_amp.planning.questions.what_if import MOST_DEVICES, Answer
from lightning_amp.planning.reports.plan_report import techniques
from lightning_amp.planning.reports.table import WIDTH, table
from lightning_amp.quantities import format_bytes, format_seconds

HEADER = ["memory", "batch", "enough on one device", "auto there", "paper needs"]
LEGEND = (
    "Memories that are answered alike share a row. Enough on one device are the fewest techniques that fit there;"
    " beside it the peak of what policy auto takes there. Paper needs so many devices of this memory, with the peak"
    f" of each; {MOST_DEVICES} are the most that were compared."
)


def what_if_report(answers: Sequence[Answer]) -> str:
    """One table for every bin size and number of strata."""
    sections = ["\n".join(wrap(LEGEND, WIDTH))]
    for (bin_bases, anchors, strata), group in groupby(answers, key=_size):
        size = "" if bin_bases is None else f"{format_resolution(bin_bases)}: "
        noun = "stratum" if strata == 1 else "strata"
        sections.append(f"{size}{anchors:,} anchors, {strata} {noun}\n{_table(list(group))}")
    return "\n\n".join(sections)


def _size(answer: Answer) -> tuple[int | None, int, int]:
    return answer.bin_bases, answer.anchors, answer.strata


def _table(answers: Sequence[Answer]) -> str:
    rows = []
    alike = groupby(((a.budget_bytes, _cells(a)) for a in answers), key=lambda pair: pair[1])
    for cells, group in alike:
        budgets = [_memory(budget) for budget, _ in group]
        rows.append([budgets[0] if len(budgets) == 1 else f"{budgets[0]} to {budgets[-1]}", *cells])
    return table(HEADER, rows)


def _memory(budget: int) -> str:
    """A memory in the unit in which it is a round number: "8 GB" is no round number of GiB."""
    if budget % 2**20 and budget % 10**6 == 0:
        return f"{budget / 10**9:.4g} GB"
    return f"{budget / 2**30:.4g} GiB"


def _cells(answer: Answer) -> tuple[str, ...]:
    if answer.enough is None:
        enough = "nothing fits"
    else:
        enough = techniques(answer.enough.strategies) if answer.enough.strategies else "fits as it is"
    peak = format_bytes(answer.paper_peak_bytes)
    devices = f"> {MOST_DEVICES}" if answer.paper_devices is None else f"{answer.paper_devices}"
    return f"{answer.batch_size:,}", enough, format_bytes(answer.auto.peak_bytes), f"{devices} x {peak}"


def recommendation_report(found: Recommendation) -> str:
    """The number of devices, what was compared, and the rule."""
    noun = "device" if found.devices == 1 else "devices"
    cells = "1 cell" if found.cells == 1 else f"{found.cells:,} cells in all"
    first = f"Worth having: {found.devices or 'no number of'} {noun}, for steps of {cells}"
    rule = (
        "The cells of a step are shared by the ranks of the data axis. Times are of whole steps, with the rates of"
        f" {found.rates_device}; the share is that of the ideal speed-up. A doubling is worth it from {WORTH} x on."
        f" Links between nodes of {found.node_devices} are slower, and counted so."
    )
    memory = "unknown" if found.budget_bytes is None else format_bytes(found.budget_bytes)
    header = ["devices", "mesh", "peak", "step", "faster", "share", "doubling", "techniques"]
    return "\n\n".join(
        [
            "\n".join(wrap(f"{first}: {found.why}", WIDTH)),
            table(header, [_row(scale) for scale in found.scales]),
            "\n".join(wrap(f"{rule} Memory of a device: {memory}.", WIDTH)),
        ]
    )


def _row(scale: Scale) -> list[str]:
    best = scale.best
    return [
        f"{scale.devices}",
        f"{best.data} x {best.model}",
        format_bytes(best.peak_bytes),
        format_seconds(scale.step_seconds),
        "-" if scale.speed_up is None else f"{scale.speed_up:.3g} x",
        "-" if scale.efficiency is None else f"{100 * scale.efficiency:.0f} %",
        scale.worth if scale.gain is None else f"{scale.worth}, {ratio(scale.gain)}",
        techniques(best.strategies),
    ]
