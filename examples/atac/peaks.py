"""A VAE of ATAC peaks and RNA under a budget, with a registered signal and technique.

    python examples/atac/peaks.py

Cells have 100,000 peaks of which 1 % are open. The signal compares peaks with genes and looks at the share of zeros;
both are in the profile of the data directory. Its technique lets the first layer read the open peaks only. The plan has
it, and the likelihood in chunks, which the budget needs. Half a minute on a CPU.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import anndata
import lightning.pytorch as pl
import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightning_amp

RATIO, ZEROS = 10, 0.95


def many_sparse_peaks(profile: lightning_amp.Profile) -> tuple[bool, str]:
    """A signal: peaks are far more than genes, and nearly all closed."""
    atac = profile.modality("atac")
    if atac is None or atac.zeros is None or atac.scale is None:
        return False, "no sparse ATAC counts together with another modality"
    raised = atac.scale >= RATIO and atac.zeros >= ZEROS
    return raised, (
        f"{atac.features:,} peaks, {atac.scale:.0f} x the next largest modality (from {RATIO} x), {atac.zeros:.1%}"
        f" of the counts are zero (from {ZEROS:.0%})"
    )


@dataclass(frozen=True)
class OpenPeaks:
    """What a rule of the plan asks for."""


class OpenPeaksLinear(nn.Linear):
    """A Linear layer that keeps the open peaks of its input, not [cell, peak]."""

    def forward(self, x: Tensor) -> Tensor:
        """y = x W^T + b, for x [cell, peak]."""
        return torch.sparse.mm(x.to_sparse(), self.weight.T) + self.bias


def install(layer: nn.Module, spec: OpenPeaks, mesh: object) -> nn.Module:
    """The replacement of a layer, with the same parameters."""
    if type(layer) is not nn.Linear or layer.bias is None:
        raise lightning_amp.InstallError(
            f"S7 does not support {type(layer).__name__!r}; it replaces torch.nn.Linear with a bias: leave S7 out"
        )
    sparse = copy.copy(layer)
    sparse.__class__ = OpenPeaksLinear
    return sparse


lightning_amp.register_signal("SPARSE_PEAKS", many_sparse_peaks)
lightning_amp.register_technique(
    "S7",
    title="open peaks",
    shrinks="[B, peaks] to its open peaks",
    spec=OpenPeaks,
    targets=lambda shape: [("first", OpenPeaks())],
    install=install,
    signal="SPARSE_PEAKS",
)


class Likelihood(nn.Module):
    """Counts of one modality given a cell's hidden layer; cells are independent, so `chunk` can split them."""

    def __init__(self, hidden: int, features: int) -> None:
        super().__init__()
        self.rates = nn.Linear(hidden, features)

    def forward(self, hidden: Tensor, counts: Tensor) -> Tensor:
        """Minus the logarithm of Poisson's likelihood, but for its constant, [cell]."""
        return F.poisson_nll_loss(self.rates(hidden), counts, reduction="none").sum(1)


class PeakVAE(pl.LightningModule):
    """Counts of peaks and of genes from one latent of a cell."""

    def __init__(self, peaks: int, genes: int, hidden: int = 32, latent: int = 8) -> None:
        super().__init__()
        self.first, self.genes = nn.Linear(peaks, hidden), nn.Linear(genes, hidden)
        self.second, self.back = nn.Linear(2 * hidden, 2 * latent), nn.Linear(latent, hidden)
        self.likelihoods = nn.ModuleList(Likelihood(hidden, features) for features in (peaks, genes))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Minus the evidence bound per cell."""
        counts = batch["atac"], batch["rna"]
        hidden = torch.cat([first(x.log1p()) for first, x in zip((self.first, self.genes), counts, strict=True)], dim=1)
        mean, spread = self.second(F.relu(hidden)).chunk(2, dim=1)
        spread = F.softplus(spread)
        hidden = F.relu(self.back(mean + spread * torch.randn_like(mean)))
        loss = (0.5 * (mean.square() + spread.square() - 1) - spread.log()).sum(1)
        for likelihood, x in zip(self.likelihoods, counts, strict=True):
            loss = loss + likelihood(hidden, x)
        self.log("loss", loss.mean())
        return loss.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Cells(Dataset[dict[str, Tensor]]):
    """Cells in which peaks and genes were both measured."""

    def __init__(self, data_dir: Path) -> None:
        self.files = {name: anndata.read_h5ad(data_dir / name / f"{name}_raw.h5ad").X for name in ("atac", "rna")}

    def __len__(self) -> int:
        """Number of cells."""
        return int(self.files["rna"].shape[0])

    def __getitem__(self, cell: int) -> dict[str, Tensor]:
        """Counts of a cell, [feature] of either modality."""
        return {name: torch.from_numpy(x[[cell]].toarray()[0]) for name, x in self.files.items()}


def synthesize(folder: Path, *, cells: int = 256, peaks: int = 100_000, genes: int = 500) -> None:
    """Two types of cells, each with open peaks of its own, and counts of genes."""
    rng = np.random.default_rng(0)
    for name, features, share in (("atac", peaks, 0.01), ("rna", genes, 0.2)):
        x = sp.random_array((cells, features), density=share, format="csr", dtype=np.float32, rng=rng)
        # cells of the second type have nothing in the first half of the features
        x.data = np.where((x.indices < features // 2) & (x.tocoo().row >= cells // 2), 0, 1).astype(np.float32)
        x.eliminate_zeros()
        (folder / name).mkdir(parents=True, exist_ok=True)
        anndata.AnnData(sp.csr_matrix(x)).write_h5ad(folder / name / f"{name}_raw.h5ad")


def train(folder: Path, *, peaks: int = 100_000, budget: str = "180MiB") -> pl.Trainer:
    """Train within the budget; the plan is shown before the first step."""
    data = folder / "data"
    if not data.exists():
        synthesize(data, peaks=peaks)
    print(lightning_amp.diagnose(lightning_amp.profile(data)))
    # the signal reads the profile of data_dir
    strategy = lightning_amp.AMPStrategy(device_memory=budget, data_dir=data)
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=2, **quiet)
    cells = Cells(data)
    model = PeakVAE(peaks, genes=len(cells[0]["rna"]))
    trainer.fit(model, DataLoader(cells, batch_size=64, shuffle=True))
    return trainer


if __name__ == "__main__":
    print(train(Path("runs/atac")).callback_metrics)
