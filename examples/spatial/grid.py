"""Spots of a tissue in three dimensions, a modality that the library does not know, under a budget.

    python examples/spatial/grid.py

The profile of a data directory names files of other modalities and reads nothing of them. The signal registered here
opens such a file: it counts the spots of a sample against its genes. The model removes noise by convolutions over the
grid of spots; the plan computes some of its blocks again, or in chunks, to stay within the budget. Half a minute on a
CPU.
"""

from pathlib import Path

import anndata
import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_amp

POINTS = 100
"""Spots of a sample for each of its genes, from which on the grid and not the genes decides the memory."""


def large_grid(profile: lightning_amp.Profile) -> tuple[bool, str]:
    """A signal: a sample has far more spots than genes."""
    found = [name for name in profile.unread if name.startswith("spatial/")]
    if not found:
        return False, "no spatial modality"
    spots = anndata.read_h5ad(Path(profile.data_dir) / found[0], backed="r")
    samples, genes = spots.obs["sample"].nunique(), spots.n_vars
    each = spots.n_obs // samples
    sides = " x ".join(str(side + 1) for side in spots.obsm["spatial"].max(0))
    spots.file.close()
    return (each >= POINTS * genes, f"{each:,} spots a sample ({sides}) for {genes} genes (from {POINTS} for a gene)")


lightning_amp.register_signal("LARGE_GRID", large_grid)


class Block(nn.Module):
    """Two convolutions over neighbours in all three dimensions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv3d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, channel, plane, row, column] -> the same."""
        return x + self.two(F.gelu(self.norm(self.one(x))))


class Denoiser(pl.LightningModule):
    """Expression of every spot, from that of its neighbours."""

    def __init__(self, genes: int, channels: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(genes, channels, 1), nn.Conv3d(channels, genes, 1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(depth))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Squared error of spots whose counts were hidden."""
        hidden = torch.rand_like(batch[:, :1]) < 0.5
        x = self.first(batch.masked_fill(hidden, 0.0))
        for block in self.blocks:
            x = block(x)
        loss = ((self.last(x) - batch).square() * hidden).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def synthesize(folder: Path, *, samples: int = 4, side: int = 32, genes: int = 4) -> None:
    """Spots on a grid, whose genes vary smoothly over the tissue."""
    rng, places = np.random.default_rng(0), np.indices((side,) * 3).reshape(3, -1).T
    counts = []
    for _ in range(samples):
        waves = rng.normal(size=(3, genes)) * 4 / side
        counts.append(rng.poisson(np.exp(1 + np.sin(places @ waves + rng.uniform(0, 6, genes)))))
    spots = anndata.AnnData(np.concatenate(counts).astype(np.float32))
    spots.obs["sample"] = np.repeat([f"embryo{i}" for i in range(samples)], side**3)
    spots.obsm["spatial"] = np.tile(places, (samples, 1))
    (folder / "spatial").mkdir(parents=True, exist_ok=True)
    spots.write_h5ad(folder / "spatial" / "spatial_raw.h5ad")


def read(folder: Path) -> Tensor:
    """Logarithms of counts as grids, [sample, gene, plane, row, column]."""
    spots = anndata.read_h5ad(folder / "spatial" / "spatial_raw.h5ad")
    _, sample = np.unique(spots.obs["sample"], return_inverse=True)
    place = spots.obsm["spatial"].T
    grid = torch.zeros(sample.max() + 1, *(place.max(1) + 1), spots.n_vars)
    grid[sample, *place] = torch.tensor(spots.X).log1p()
    return grid.movedim(-1, 1).contiguous()


def train(folder: Path, *, side: int = 32, budget: str = "25MiB", epochs: int = 5) -> pl.Trainer:
    """Train within the budget; the plan is shown before the first step."""
    data = folder / "data"
    if not data.exists():
        synthesize(data, side=side)
    # the signal reads the profile of data_dir
    strategy = lightning_amp.AMPStrategy(device_memory=budget, data_dir=data, verbose=True)
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=epochs, **quiet)
    grids = read(data)
    trainer.fit(Denoiser(genes=grids.shape[1]), DataLoader(list(grids), batch_size=2, shuffle=True))
    return trainer


if __name__ == "__main__":
    print(train(Path("runs/spatial")).callback_metrics)
