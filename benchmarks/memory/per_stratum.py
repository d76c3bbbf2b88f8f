"""The picture of the documentation's first page: memory after each stratum, with nothing installed and with ours.

    python -m benchmarks.memory.per_stratum --out docs

Simulated, so no GPU is needed: the decoder of the AMP paper's ablation, batch 1, on one device. Takes about a minute.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_amp.figures import PALETTE, RED
from lightning_amp.simulation.parse_shape import parse_shape
from lightning_amp.simulation.simulate import request_decoder, simulate_plan

SHAPE = "anchors=113505,dim=128,strata=32,batch=1"
GIB = 2**30
DEVICE_GIB = 24
OURS = "S1,S4,fused,sparse,stream"
CURVES = (
    ("S1", "plain decoder"),
    ("S1,S3,S4", "chunked attention,\nselected keys (S3 + S4)"),
    (OURS, "lightning-amp: one stratum at a time"),
)
GROUNDS = {
    "": ("white", "#222222", (RED, "#b0558b", PALETTE[0])),
    "_dark": ("#1e2129", "#d5d7de", ("#ff6b6b", "#d99bbd", PALETTE[4])),
}
"""Suffix of the file -> ground, ink, and colours of the curves; the dark ground is that of the site's dark scheme."""


def strata_gib(strategies: str) -> list[float]:
    """Memory after each stratum of the forward pass, and at the end of it, in GiB."""
    made = request_decoder(
        parse_shape(SHAPE),
        devices=1,
        device_memory=None,
        policy="auto",
        strategies=strategies,
        batch_size=64,
        model_parallel_size="auto",
    )
    return [size / GIB for size in simulate_plan(*made).bytes_of_strata.values()]


def draw(path: Path, curves: dict[str, list[float]], ground: str, ink: str, colours: Sequence[str]) -> None:
    """One picture on one ground."""
    figure = Figure(figsize=(6.4, 4.0), facecolor=ground, layout="constrained")
    axes = figure.add_subplot(facecolor=ground)
    for (strategies, label), colour in zip(CURVES, colours, strict=True):
        _curve(axes, curves[strategies], label, colour)
    axes.axhline(DEVICE_GIB, color=ink, linestyle="--", linewidth=1.2)
    axes.text(0, DEVICE_GIB + 0.6, f"a device of {DEVICE_GIB} GiB", color=ink)
    axes.set_xlabel("stratum of the Hi-C decoder", color=ink)
    axes.set_ylabel("memory (GiB)", color=ink)
    axes.set_ylim(0, 50)
    axes.set_xlim(-0.5, 31.7)
    axes.tick_params(colors=ink)
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(ink)
    figure.savefig(path, dpi=150)


def _curve(axes: Axes, sizes: list[float], label: str, colour: str) -> None:
    """A line with its label; where it exceeds the device it is crossed, and dotted from there on."""
    end = next((k for k, size in enumerate(sizes) if size > DEVICE_GIB), len(sizes) - 1)
    axes.plot(sizes[: end + 1], "-", color=colour, linewidth=2.6)
    if sizes[end] > DEVICE_GIB:
        axes.plot(range(end, len(sizes)), sizes[end:], ":", color=colour, linewidth=2)
        axes.plot([end], [sizes[end]], "X", color=colour, markersize=11)
        text, offset = f"{label}:\nout of memory at stratum {end}", (-14, 26)
    else:
        text, offset = f"{label}, {sizes[end]:.1f} GiB", (0, 8 if sizes[end] < 5 else -60)
    axes.annotate(text, (end, sizes[end]), offset, textcoords="offset points", ha="right", color=colour)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    folder = parser.parse_args().out
    curves = {row[0]: strata_gib(row[0]) for row in CURVES}
    for suffix, colouring in GROUNDS.items():
        draw(folder / f"memory_per_stratum{suffix}.png", curves, *colouring)


if __name__ == "__main__":
    main()
