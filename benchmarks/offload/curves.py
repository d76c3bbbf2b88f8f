"""Draw the predicted step of six models on a GPU against its peak: replay, offload, both, and recompute.

    python -m benchmarks.offload.curves [--device H100] [--only NAME ...] [--out docs/techniques/offload_curves.png]

For each model and each of several budgets: the plan's counted peak, as a share of the peak of the plain step, and its
predicted seconds, as a ratio to the plain step. A plan that fits no budget is drawn where its peak is. Everything is
predicted, by fake tensors and the rates of a data sheet: nothing is trained. A model of timm is left out where it is
not installed. About five minutes.
"""

import argparse
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from benchmarks.offload.__main__ import Vit
from lightning_amp.costs.device_rates import Rates, rates_for
from lightning_amp.errors import AmpError
from lightning_amp.figures import GREY, MARKERS, PALETTE, new_figure, save_figure
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.base.plan_request import StepRequest
from lightning_amp.planning.modules.candidates import draft
from lightning_amp.techniques.offload.row import Offload
from tests.techniques.replay.models import Llama, Points, ResNet, Trained, UNet, WaveNet

SHARES = 0.85, 0.7, 0.55, 0.4, 0.25
WAYS = {
    "replay": ("replay",),
    "offload": ("offload",),
    "replay and offload": ("replay", "offload"),
    "recompute": ("recompute",),
}
MOST = 3.0
"""Largest ratio of seconds that is drawn."""
_LINE = {"markersize": 4, "linewidth": 1.4}
STYLES: dict[str, dict[str, Any]] = {
    # below the others, which it equals where one of them is as fast
    "replay and offload": {"color": PALETTE[2], "linewidth": 5, "alpha": 0.45},
    "replay": {"color": PALETTE[0], "marker": MARKERS[0], **_LINE},
    "offload": {"color": PALETTE[1], "marker": MARKERS[1], **_LINE},
    "recompute": {"color": PALETTE[5], "marker": MARKERS[3], **_LINE},
}
Case = tuple[Callable[[], Trained], Callable[[], Tensor]]
CASES: dict[str, Case] = {
    "transformer (Llama)": (lambda: Llama(width=512, heads=8, words=8000), lambda: torch.randint(0, 8000, (16, 1025))),
    "U-Net": (lambda: UNet(width=64), lambda: torch.randn(16, 1, 256, 256)),
    "ResNet": (lambda: ResNet(width=64), lambda: torch.randn(32, 1, 224, 224)),
    "WaveNet": (lambda: WaveNet(width=64), lambda: torch.randn(16, 1, 16_000)),
    "points": (lambda: Points(width=256, slices=64), lambda: torch.rand(8, 32_000, 3)),
}
if find_spec("timm"):
    CASES["ViT (timm)"] = (
        lambda: Vit("vit_small_patch16_224", depth=6, img_size=224),
        lambda: torch.randn(64, 3, 224, 224),
    )
Curves = dict[str, list[tuple[float, float]]]


def curves_of(case: Case, rates: Rates) -> Curves:
    """Return for each way the shares of the plain peak and the ratios of the plain seconds, the largest peak first."""
    torch.manual_seed(0)
    make, batch = case
    step = StepOfModule(make(), batch, run_settings=RunSettings())
    seen = step.profiled(rates, StepRequest(requested={"offload": Offload()}))
    plain, found = seen.peak_bytes(1), Curves()
    for way, names in WAYS.items():
        points = {(1.0, 1.0)}
        for share in SHARES:
            try:
                made = draft(seen, names, ranks=1, budget=int(share * plain))
                if isinstance(made, str):
                    break
                peak = step.run_with(made.targets, profile_module).larger_peak_bytes
            except AmpError:
                break
            points.add((peak / plain, made.seconds / seen.seconds))
            if peak > share * plain:
                break
        # without those that another one beats
        best = [p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]
        if len(best) > 1:
            found[way] = sorted(best, reverse=True)
    return found


def draw(path: Path, every: dict[str, Curves], device: str) -> None:
    """Draw a panel for each model."""
    figure = new_figure(9, 5.6)
    panels = figure.subplots(2, 3, sharey=True, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for panel, (name, curves) in zip(panels, every.items(), strict=False):
        for way, style in STYLES.items():
            if way in curves:
                x, y = zip(*curves[way], strict=True)
                (handles[way],) = panel.plot([100 * one for one in x], y, label=way, **style)
        panel.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        panel.set_title(name, fontsize=10)
        panel.xaxis.set_major_formatter(PercentFormatter(decimals=0))
        panel.set_xlim(10, 103)
        panel.set_ylim(0.9, MOST)
        panel.tick_params(labelsize=8)
    for panel in panels[len(every) :]:
        panel.set_visible(False)
    for panel in panels[3:]:
        panel.set_xlabel("peak, of the plain step", fontsize=9)
    for panel in panels[::3]:
        panel.set_ylabel("seconds, ratio to plain", fontsize=9)
    figure.suptitle(f"Predicted for one {device}, in float32", fontsize=11)
    names = [way for way in WAYS if way in handles]
    figure.legend(
        [handles[way] for way in names], names, loc="outside lower center", ncols=4, fontsize=9, frameon=False
    )
    save_figure(figure, path)


def main() -> None:
    """Print the points and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("docs/techniques/offload_curves.png"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    every = dict[str, Curves]()
    print("| model | way | peak, of plain: seconds, of plain |\n|---|---|---|")
    for name in asked.only:
        every[name] = curves_of(CASES[name], rates_for(asked.device))
        for way, points in every[name].items():
            shown = ", ".join(f"{x:.0%}: {y:.2f}" for x, y in points)
            print(f"| {name} | {way} | {shown} |", flush=True)
    draw(asked.out, every, asked.device)


if __name__ == "__main__":
    main()
