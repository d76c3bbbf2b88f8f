"""A recommendation of devices as text of at most 80 columns."""

from textwrap import wrap

from lightning_amp.planning.policies.recommend_devices import WORTH, Recommendation, Scale, ratio
from lightning_amp.planning.reports.plan_report import techniques
from lightning_amp.planning.reports.table import WIDTH, table
from lightning_amp.quantities import format_bytes, format_seconds


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
