"""Cells made in memory: a decoder's batch, and a data module without files and the packages that read them.

Legend: cell (B), feature (F in all).
"""

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.data.files.graphml import Graph
from lightning_amp.data.files.strata_layout import FeatureLayout, Stratum
from lightning_amp.data.loading.datamodule import HIC, SingleCellDataModule
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.data.sparse_counts import SparseCounts

NONZERO = 0.02
"""Share of the counts that are not zero."""
LATENT_SCALE = 0.1


def decoder_batch(shape: DecoderShape, cells: int, *, sparse: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What a decoder reads, in the host's memory, the same for the same sizes; latents need gradients."""
    n_features = sum(shape.features)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    # in the order of columns, each place once
    flat = np.unique(rng.integers(0, cells * n_features, max(1, int(NONZERO * cells * n_features))))
    row, column = (torch.from_numpy(part) for part in (flat % cells, flat // cells))
    value = (1 + column % 4).to(dtype)
    counts = SparseCounts(row, column, value, (cells, n_features))
    library = torch.ones(cells, dtype=dtype).index_add_(0, row, value)[:, None]
    u, v = (
        LATENT_SCALE * torch.randn(n, shape.dim, generator=generator, dtype=torch.float64)
        for n in (cells, shape.anchors)
    )
    return {
        "u": u.to(dtype).requires_grad_(),
        "v": v.to(dtype).requires_grad_(),
        "x": counts if sparse else counts.to_dense(),
        "library": library,
        "batch": torch.arange(cells) % shape.n_batches,
    }


def batch_bytes(shape: DecoderShape, cells: int, *, sparse: bool) -> int:
    """Bytes of about such a batch in float32: places of entries are two whole numbers of 8 bytes."""
    numbers = cells * sum(shape.features)
    counts = int(NONZERO * numbers) * (8 + 8 + 4) if sparse else 4 * numbers
    return counts + 4 * (cells + shape.anchors) * shape.dim + 12 * cells


def moved(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on a device; latents are leaves there."""

    def move(part: Tensor | SparseCounts) -> Tensor | SparseCounts:
        if isinstance(part, Tensor) and part.requires_grad:
            return part.detach().to(device).requires_grad_()
        return part.to(device)

    return {name: move(part) for name, part in batch.items()}


class _Table(CellTable):
    """Cells of one modality that were never in a file."""

    def __init__(self, modality: str, counts: sp.csr_matrix) -> None:
        self.modality, self.counts, self.columns = modality, counts, None
        self.n_cells, self.n_features = counts.shape
        self.contacts = np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel()
        self.batch, self.n_batches = np.zeros(self.n_cells, dtype=np.int64), 1


class CellsInMemory(SingleCellDataModule):
    """Hi-C and RNA cells of random counts, one chromosome of so many bins, and a graph that joins both.

    Args:
        cells: Of each modality.
        bins: Anchors N.
        strata: K.
        genes: Features of RNA.
        options: Of SingleCellDataModule, such as batch_size and num_workers.
    """

    def __init__(self, *, cells: int, bins: int, strata: int, genes: int, **options: Any) -> None:
        super().__init__(".", val_fraction=0.0, **options)
        # there is no directory to read a profile from
        self.data_dir = None  # type: ignore[assignment]
        rng, widths = np.random.default_rng(0), [bins - k for k in range(strata)]
        ends = np.cumsum(widths).tolist()
        found = tuple(
            Stratum(k=k, resolution=None, start=end - n, stop=end, anchors=np.arange(n))
            for k, (n, end) in enumerate(zip(widths, ends, strict=True))
        )
        self.layout = FeatureLayout(strata=found, anchor_names=_names("bin", bins))
        features = {HIC: ends[-1], "rna": genes}
        self.tables = {name: _Table(name, _counts(rng, cells, n)) for name, n in features.items()}
        self.graph = _graph(bins, genes)

    def vertices(self, modality: str) -> NDArray[np.int64]:
        """Anchors first, then genes."""
        bins = len(self.layout.anchor_names) if self.layout is not None else 0
        return np.arange(bins) if modality == HIC else bins + np.arange(self.tables[modality].n_features)


def _counts(rng: np.random.Generator, cells: int, features: int) -> sp.csr_matrix:
    flat = np.unique(rng.integers(0, cells * features, int(NONZERO * cells * features) + cells))
    row, column = np.divmod(flat, features)
    value = (1 + flat % 4).astype(np.float32)
    return sp.csr_matrix((value, (row, column)), shape=(cells, features))


def _graph(bins: int, genes: int) -> Graph:
    """Every vertex joined to itself, each gene to a bin."""
    n = bins + genes
    source = np.concatenate([np.arange(n), bins + np.arange(genes)])
    target = np.concatenate([np.arange(n), np.arange(genes) * bins // max(genes, 1)])
    ones = np.ones(len(source), dtype=np.float32)
    return Graph(vertices=_names("v", n), source=source, target=target, weight=ones, sign=ones)


def _names(kind: str, n: int) -> NDArray[np.str_]:
    return np.array([f"{kind}{i}" for i in range(n)])
