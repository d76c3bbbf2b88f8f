"""Host memory and time to the first batch of ranks that read whole rows, and of ranks that read their own columns.

    python -m benchmarks.domain.loading [--gib 0.25] [--ranks 1 2 4] [--format json]

Writes synthetic counts to a temporary folder, as large as asked: sparse ones as CSR and by columns (CSC), and dense
ones. Then as many processes as there are ranks read a file at once, each up to a batch of 64 cells:

    whole rows     `CellTable`, as `SingleCellDataModule` reads without a model axis
    own, counted   `CellTable` with own columns, as it reads under `sequence`; library sizes are of all columns
    own columns    `OwnColumns`, for data modules of one's own

Memory is the peak of each process's resident set above what it had before it read (VmHWM), added up over the ranks;
files that the system caches are not in it. Time is that of the last rank. Ratios are to whole rows of the CSR or dense
file with as many ranks. Two minutes for the default, a quarter of an hour and 10 GB of memory for 2 GiB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from lightning_amp.data.files.read_columns import store_by_columns
from lightning_amp.data.files.write_h5ad import write_annotations
from lightning_amp.quantities import format_bytes, format_seconds

FEATURES, SHARE, BATCH, GIB = 20_000, 0.05, 64, 2**30
ROWS = 500
"""Cells that are written together."""
READ = {
    "csr": ("whole rows", "own, counted", "own columns"),
    "csc": ("own, counted", "own columns"),
    "dense": ("whole rows", "own, counted", "own columns"),
}


def write(path: Path, gib: float, *, dense: bool) -> None:
    """Write counts of so many bytes, not compressed."""
    rng, drawn = np.random.default_rng(0), int(FEATURES * SHARE)
    n_cells = int(gib * GIB / (4 * FEATURES if dense else 8 * drawn))
    with h5py.File(path, "w") as file:
        if dense:
            x = file.create_dataset("X", (n_cells, FEATURES), np.float32)
        else:
            x = file.create_group("X")
            x["indptr"] = np.arange(n_cells + 1) * drawn
            for name, kind in (("data", np.float32), ("indices", np.int32)):
                x.create_dataset(name, (n_cells * drawn,), kind, chunks=(65_536,))
        for start in range(0, n_cells, ROWS):
            n = min(ROWS, n_cells - start)
            # one feature in every run of FEATURES / drawn
            columns = np.arange(drawn) * (FEATURES // drawn) + rng.integers(
                FEATURES // drawn, size=(n, drawn)
            )
            counts = rng.integers(1, 9, (n, drawn)).astype(np.float32)
            if dense:
                block = np.zeros((n, FEATURES), np.float32)
                np.put_along_axis(block, columns, counts, axis=1)
                x[start : start + n] = block
            else:
                x["data"][start * drawn : (start + n) * drawn] = counts.ravel()
                x["indices"][start * drawn : (start + n) * drawn] = columns.ravel()
        kind = "array" if dense else "csr_matrix"
        version = "0.2.0" if dense else "0.1.0"
        x.attrs.update({"encoding-type": kind, "encoding-version": version, "shape": [n_cells, FEATURES]})
        names = [pd.DataFrame(index=[f"{i}" for i in range(k)]) for k in (n_cells, FEATURES)]
        write_annotations(file, obs=names[0], var=names[1], uns={})


def read(path: Path, how: str, rank: int, ranks: int) -> None:
    """Read as one rank, once a line has come in; print bytes and seconds."""
    # what is imported late is no part of it
    import anndata.io  # noqa: F401

    from lightning_amp.data.loading.dataset import CellTable
    from lightning_amp.data.loading.own_columns import OwnColumns
    from lightning_amp.dist.own_parts import OwnParts

    own = OwnParts(rank=rank, size=ranks).part(FEATURES)
    print("ready", flush=True)
    input()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.perf_counter()
    cells = np.random.default_rng(1).integers(0, 500, BATCH)
    if how == "own columns":
        x = OwnColumns(path, own).rows(cells)
    else:
        x = CellTable(path, "rna", None if how == "whole rows" else own).rows(cells)["x"]
    seconds = time.perf_counter() - began
    print(json.dumps([resident("VmHWM") - before, seconds, list(x.shape)]), flush=True)
    input()


def resident(name: str) -> int:
    """Bytes of this process, by Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(path: Path, how: str, ranks: int) -> dict[str, Any]:
    """Of so many processes at once: bytes of all, and seconds of the last."""
    command = [sys.executable, "-m", "benchmarks.domain.loading", "--read", str(path), how, str(ranks)]
    started = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    found = []
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    for process in started:
        _go_on(process)
    for process in started:
        assert process.stdout is not None
        found.append(json.loads(process.stdout.readline()))
    for process in started:
        _go_on(process)
        process.wait()
    return {"bytes": sum(each[0] for each in found), "seconds": max(each[1] for each in found)}


def _go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def main() -> None:
    """Write, read and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        path, how, ranks, rank = asked.read
        read(Path(path), how, int(rank), int(ranks))
        return
    if asked.format == "table":
        print("| file | read | ranks | peak of all ranks | of whole rows | first batch | of whole rows |")
        print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layout, readings in READ.items():
            path = Path(folder) / "counts.h5ad"
            if layout == "csc":
                store_by_columns(path)
            else:
                write(path, asked.gib, dense=layout == "dense")
            for how, ranks in product(readings, asked.ranks):
                row = {"file": layout, "read": how, "ranks": ranks, **measure(path, how, ranks)}
                rows.append(row)
                same = (other for other in rows if other["read"] == "whole rows" and other["ranks"] == ranks)
                of = next(other for other in same if (layout == "dense") == (other["file"] == "dense"))
                row |= {f"{name}_ratio": row[name] / of[name] for name in ("bytes", "seconds")}
                if asked.format == "table":
                    line = [layout, how, str(ranks), format_bytes(row["bytes"]), f"{row['bytes_ratio']:.2f}"]
                    line += [format_seconds(row["seconds"]), f"{row['seconds_ratio']:.2f}"]
                    print(f"| {' | '.join(line)} |", flush=True)
    if asked.format == "json":
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
