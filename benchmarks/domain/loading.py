"""Host memory and time to the first batch of ranks that read whole rows, and of ranks that read their own columns.

    python -m benchmarks.domain.loading [--gib 0.25] [--ranks 1 2 4] [--quick]

Writes synthetic counts to a temporary folder, as large as asked: sparse ones as CSR and by columns (CSC), and dense
ones. Then as many processes as there are ranks read a file at once, each up to a batch of 64 cells:

    whole rows     `CellTable`, as `SingleCellDataModule` reads without a model axis
    own, counted   `CellTable` with own columns, as it reads under `sequence`; library sizes are of all columns
    own columns    `OwnColumns`, for data modules of one's own

Memory is the peak of each process's resident set above what it had before it read (VmHWM), added up over the ranks;
files that the system caches are not in it. Time is that of the last rank. Ratios are to whole rows of the CSR or dense
file with as many ranks. Two minutes for the default, a quarter of an hour and 10 GB of memory for 2 GiB; with --quick
(0.05 GiB, two ranks) half a minute.
"""

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
from anndata import AnnData
from scipy import sparse

from benchmarks.tensor3d.ranks import Ranks
from lightning_amp.data.files.read_h5ad import store_by_columns
from lightning_amp.data.loading.dataset import CellTable, OwnColumns
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.sharding.own_parts import OwnParts

FEATURES, DRAWN, BATCH, GIB = 20_000, 1_000, 64, 2**30
"""Of a cell one feature in every run of FEATURES / DRAWN is counted."""
READ = {
    "csr": ("whole rows", "own, counted", "own columns"),
    "csc": ("own, counted", "own columns"),
    "dense": ("whole rows", "own, counted", "own columns"),
}


def write(path: Path, gib: float, *, dense: bool) -> None:
    """Write counts of so many bytes, not compressed."""
    rng, run = np.random.default_rng(0), FEATURES // DRAWN
    n_cells = int(gib * GIB / (4 * FEATURES if dense else 8 * DRAWN))
    columns = np.arange(DRAWN, dtype=np.int32) * run + rng.integers(run, size=(n_cells, DRAWN), dtype=np.int32)
    counts = rng.integers(1, 9, columns.size).astype(np.float32)
    x = sparse.csr_matrix((counts, columns.ravel(), np.arange(n_cells + 1) * DRAWN), (n_cells, FEATURES))
    AnnData(x.toarray() if dense else x).write_h5ad(path)


def read(rank: int, ranks: int, path: Path, how: str) -> tuple[int, float]:
    """Bytes and seconds of one rank up to a batch."""
    own = OwnParts(rank=rank, size=ranks).part(FEATURES)
    cells = np.random.default_rng(1).integers(0, 500, BATCH)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.perf_counter()
    if how == "own columns":
        OwnColumns(path, own).rows(cells)
    else:
        CellTable(path, "rna", None if how == "whole rows" else own).rows(cells)
    return resident("VmHWM") - before, time.perf_counter() - began


def resident(name: str) -> int:
    """Bytes of this process, by Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(path: Path, how: str, ranks: int) -> tuple[int, float]:
    """Bytes of all ranks, in new processes, and seconds of the last one."""
    pool = Ranks(ranks, read, patience=900)
    n_bytes, seconds = zip(*pool.results(path, how), strict=True)
    pool.end()
    return sum(n_bytes), max(seconds)


def main() -> None:
    """Write, read and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--quick", action="store_true", help="0.05 GiB, two ranks")
    asked = parser.parse_args()
    gib, counts = (0.05, [2]) if asked.quick else (asked.gib, asked.ranks)
    print("| file | read | ranks | peak of all ranks | of whole rows | first batch | of whole rows |")
    print("|---|---|---|---|---|---|---|")
    whole = dict[int, tuple[int, float]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.h5ad"
        for layout, readings in READ.items():
            if layout == "csc":
                store_by_columns(path)
            else:
                write(path, gib, dense=layout == "dense")
            for how, ranks in product(readings, counts):
                n_bytes, seconds = measured(path, how, ranks)
                if how == "whole rows":
                    whole[ranks] = n_bytes, seconds
                cells = [layout, how, str(ranks), format_bytes(n_bytes), f"{n_bytes / whole[ranks][0]:.2f}"]
                cells += [format_seconds(seconds), f"{seconds / whole[ranks][1]:.2f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
