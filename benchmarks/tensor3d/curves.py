"""Train a small GPT and a small U-Net on 8 and 16 ranks and on one process, and draw their losses (Figure 8 of AxoNN).

    python -m benchmarks.tensor3d.curves [--steps 100] [--ranks 8 16] [--only GPT]
    python -m benchmarks.tensor3d.curves --float32 --steps 300 --write

The grid is 2 x 2 x 2, so that all axes are in use, on 16 ranks with two copies; data are synthetic and drawn by seed,
and one process takes the batches of all ranks together, as plain data parallelism would. In float64 the losses of 100
steps are compared; with --float32 those of 300 steps are drawn into docs/reports/tensor3d_curves.png. Processes on this
machine, connected by gloo; four minutes on two cores.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.models import GPT, Net, UNet
from benchmarks.tensor3d.ranks import Ranks
from benchmarks.tensor3d.small import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.figures import DPI, INK, PALETTE
from tests.lightning.strategy.strategy_cases import RunningRanks

GRID, ROWS, BOUND = (2, 2, 2), 16, 1e-10
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "reports" / "tensor3d_curves.png"


def _text(draw: torch.Generator) -> Tensor:
    """Words that follow one another by a rule, with one of five drawn at random."""
    rows = [torch.randint(17, (ROWS,), generator=draw)]
    for _ in range(8):
        stray = torch.randint(17, (ROWS,), generator=draw)
        rule = (3 * rows[-1] + 5) % 17
        rows.append(torch.where(torch.rand(ROWS, generator=draw) < 0.2, stray, rule))
    return torch.stack(rows, 1)


def _images(draw: torch.Generator) -> Tensor:
    """A bright disc on each image, and noise."""
    at = torch.rand(ROWS, 2, 1, 1, generator=draw) * 6 + 1
    y, x = torch.arange(8.0)[:, None], torch.arange(8.0)[None]
    disc = (((y - at[:, 0]) ** 2 + (x - at[:, 1]) ** 2) < 5).float()
    image = disc[:, None] * torch.tensor([1.0, 0.5, -0.5])[:, None, None]
    return torch.cat([image, torch.randn(ROWS, 3, 8, 8, generator=draw)], 1)


class Settled:
    """Adam whose steps do not follow gradients that are rounding alone, such as those of biases of keys."""

    def configure_optimizers(self: Any) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 3e-3, eps=1e-4)


class Words(Settled, GPT):
    """A GPT of two blocks."""

    def __init__(self) -> None:
        super().__init__(16, 4, 2, 17, 8)


class Pixels(Settled, UNet):
    """A U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__(8)


CASES = {"GPT": (Words, _text), "U-Net": (Pixels, _images)}


def trained(rank: int, ranks: int, name: str, steps: int, double: bool) -> Tensor:
    """Losses of all steps, of all ranks' rows."""
    kind, batch_of = CASES[name]
    draw = torch.Generator().manual_seed(0)
    batches = [batch_of(draw) for _ in range(steps)]
    given: dict[str, Any] = {"devices": 1}
    if ranks > 1:
        x, y, _ = GRID
        rows = ROWS * x * y // ranks
        batches = [batch[rank // (x * y) * rows :][:rows] for batch in batches]
        strategy = AMPStrategy(strategies="tensor3d", tensor_grid=GRID)
        given = {"strategy": strategy, "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    seed_everything(0, verbose=False)
    module: Net = kind()
    module.keep = True
    if double:
        module = module.double()
        batches = [b.double() if b.is_floating_point() else b for b in batches]
    Trainer(**QUIET, **given).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    losses = torch.stack(module.losses)
    if ranks > 1:
        torch.distributed.all_reduce(losses)
    return losses / ranks


def draw(path: Path, found: dict[str, dict[int, list[float]]]) -> None:
    """One panel for each model."""
    figure = Figure(figsize=(3.4 * len(found), 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, curves) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for i, (ranks, losses) in enumerate(curves.items()):
            label = "one process" if ranks == 1 else f"{ranks} ranks, 2 x 2 x 2"
            style = {"color": INK, "lw": 2.5, "alpha": 0.35} if ranks == 1 else {"color": PALETTE[i - 1], "lw": 0.9}
            axes.plot(losses, label=label, **style, ls="-" if ranks != 16 else "--")
        axes.set(title=name, xlabel="step", ylabel="training loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=DPI)


def main() -> None:
    """Train, print the largest differences, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--only", default="")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--write", action="store_true", help="draw the picture of the docs")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found, wrong = dict[str, dict[int, list[float]]](), 0
    print("| model | ranks | first loss | last loss | largest relative difference |\n|---|---|---|---|---|")
    for name in (name for name in CASES if asked.only in name):
        right = trained(0, 1, name, asked.steps, not asked.float32)
        found[name] = {1: right.tolist()}
        for ranks in asked.ranks:
            pool = Ranks(ranks, trained, patience=900)
            losses = pool.results(name, asked.steps, not asked.float32)[0]
            pool.end()
            apart = float(((losses - right) / right).abs().max())
            wrong += apart > BOUND and not asked.float32
            found[name][ranks] = losses.tolist()
            print(f"| {name} | {ranks} | {losses[0]:.4f} | {losses[-1]:.4f} | {apart:.0e} |", flush=True)
    if asked.write:
        draw(PICTURE, found)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
