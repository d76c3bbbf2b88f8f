"""Time and memory of `lightning-amp profile` on a Hi-C file of about 1 GB; the target is 2 s and 300 MB.

    python -m benchmarks.profile_files [--gigabytes 1] [--repeats 5]

The file is made in a temporary folder: 27,000 bins, 48 strata, 1.29 million features whose strata must be read from
their names, which is the slowest case. Prints whole-process figures as the operating system accounts for them.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BINS, STRATA, CELLS = 27_000, 48, 2_000
BYTES_PER_VALUE = 8


def write(path: Path, gigabytes: float) -> None:
    """Write an h5ad with counts that nobody reads; in a process of its own, see `measure`."""
    import h5py
    import numpy as np
    import pandas as pd
    from anndata.io import write_elem

    values = int(gigabytes * 1e9 / BYTES_PER_VALUE)
    names = [
        f"chr1:{i * 100_000}-{(i + 1) * 100_000}" + (f"-{k}" if k else "")
        for k in range(STRATA)
        for i in range(BINS - k)
    ]
    path.parent.mkdir(parents=True)
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        depth = pd.DataFrame({"depth": np.ones(CELLS)}, index=[f"cell{i}" for i in range(CELLS)])
        write_elem(file, "obs", depth)
        write_elem(file, "var", pd.DataFrame(index=names))
        x = file.create_group("X")
        x.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [CELLS, len(names)]}
        )
        x["data"], x["indices"] = np.ones(values, np.float32), np.zeros(values, np.int32)
        x["indptr"] = np.linspace(0, values, CELLS + 1).astype(np.int64)


def measure(folder: Path) -> tuple[float, float]:
    """Seconds and megabytes of one run of the command.

    A child's peak is counted from its fork, so this process must stay small for the figure to be the command's.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "lightning_amp", "profile", str(folder), "--format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command!r} ended with status {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss / 1e3


def main() -> None:
    """Write the file, measure, print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hic" / "hic.h5ad"
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(path, arguments.gigabytes))
        writer.start()
        writer.join()
        measure(Path(folder))
        runs = [measure(Path(folder)) for _ in range(arguments.repeats)]
        seconds, megabytes = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{path.stat().st_size / 1e9:.2f} GB: median {seconds:.2f} s, {megabytes:.0f} MB peak")


if __name__ == "__main__":
    main()
