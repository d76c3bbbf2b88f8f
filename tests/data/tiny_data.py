"""Tiny input files for the data tests: two chromosomes of 12 and 8 bins, six Hi-C cells, eight RNA cells."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata
import cooler
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp

BIN = 1_000_000
SIZES = {"chr1": 12, "chr2": 8}
CELLS = [f"cell_{i}" for i in (1, 2, 3, 10, 11, 12)]
GENES = [f"G{i}" for i in range(10)]


@dataclass(frozen=True)
class Files:
    hic: Path
    rna: Path
    genes: Path
    labels: Path
    out: Path

    def arguments(self) -> dict[str, Any]:
        return {"hic": self.hic, "rna": self.rna, "genes": self.genes, "out": self.out, "strata": 4}


def make_bins(sizes: dict[str, int] = SIZES, width: int = BIN) -> pd.DataFrame:
    """Bins of fixed width; the last of a chromosome is half as wide, as a chromosome's end has it."""
    rows = [
        (c, i * width, i * width + (width if i < n - 1 else width // 2)) for c, n in sizes.items() for i in range(n)
    ]
    return pd.DataFrame(rows, columns=["chrom", "start", "end"])


def make_pixels(seed: int, n_bins: int = 20, n: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    pairs = np.unique(np.sort(rng.integers(0, n_bins, size=(n, 2)), axis=1), axis=0)
    return pd.DataFrame({"bin1_id": pairs[:, 0], "bin2_id": pairs[:, 1], "count": rng.integers(1, 9, len(pairs))})


def write_scool(path: Path, cells: dict[str, pd.DataFrame], bins: Any = None, dtype: type = np.int32) -> None:
    bins = make_bins() if bins is None else bins
    cooler.create_scool(str(path), bins, cells, dtypes={"count": dtype})


def write_rna(path: Path, counts: Any, *, layer: Any = None, genes: list[str] | None = None) -> None:
    genes = [*GENES, "UNPLACED1", "UNPLACED2"] if genes is None else genes
    obs = pd.DataFrame({"cell_type": ["a", "b"] * 4}, index=[f"rna_{i}" for i in range(8)])
    table = anndata.AnnData(counts, obs=obs, var=pd.DataFrame(index=genes))
    if layer is not None:
        table.layers["counts"] = layer
    table.write_h5ad(path)


def rna_counts() -> Any:
    return sp.csr_matrix(np.random.default_rng(7).poisson(2.0, size=(8, 12)).astype(np.float32))


def write_all(root: Path) -> Files:
    files = Files(root / "cells.scool", root / "rna.h5ad", root / "genes.bed", root / "labels.tsv", root / "out")
    write_scool(files.hic, {cell: make_pixels(i) for i, cell in enumerate(CELLS)})
    write_rna(files.rna, rna_counts())
    # Genes 0 to 5 on chromosome 1, the others on 2, one a bin; even ones on the forward strand.
    lines = [
        f"{1 + (i >= 6)}\t{(i % 6) * BIN + 100_000}\t{(i % 6) * BIN + 150_000}\t{gene}\t0\t{'+-'[i % 2]}"
        for i, gene in enumerate(GENES)
    ]
    files.genes.write_text("\n".join(["track name=genes", *lines]) + "\n")
    rows = [f"{cell}.1mb\t{100 + i}\tb{i % 2}\ttype{i % 3}" for i, cell in enumerate(CELLS)]
    files.labels.write_text("\n".join(["cell\tdepth\tbatch\tcluster", *rows]) + "\n")
    return files


def edit(path: Path, change: Callable[[Any], object]) -> None:
    with h5py.File(path, "a") as file:
        change(file)
