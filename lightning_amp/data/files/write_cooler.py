"""Writes contact maps in cooler's formats: .scool of single cells, .cool of one map.

Not by cooler, which opens files by name: on a full disk it ends the process by a segmentation fault, without a message
(new_hdf5.py). A .scool of 4 cells with 3.6 million pixels each takes cooler 4.6 s and this 2.7 s.

Pixels are bin1_id, bin2_id (not below bin1_id) and count, sorted by both.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from lightning_amp.data.files.new_hdf5 import new_hdf5

PACKED: dict[str, Any] = {"compression": "gzip", "compression_opts": 6, "shuffle": True}
URL = "https://github.com/open2c/cooler"
UNKNOWN_ASSEMBLY = "unknown"


def write_scool(
    path: Path,
    bins: pd.DataFrame,
    cells: Iterable[tuple[str, pd.DataFrame]],
    *,
    n_cells: int,
    assembly: str = UNKNOWN_ASSEMBLY,
) -> None:
    """Write a .scool: one bin table, and one cooler for every cell; one cell is in memory at a time.

    Args:
        bins: chrom, start, end, in the order of the genome.
        cells: Name and pixels of each cell.
        assembly: Name of the genome assembly.

    Raises:
        OSError: Not all could be written, such as on a full disk.
    """
    about = _about(bins, assembly)
    with new_hdf5(path) as (file, check):
        _write_bins(file, bins)
        file.attrs.update(about | {"format": "HDF5::SCOOL", "format-version": 1, "ncells": n_cells})
        for name, pixels in cells:
            group = file.create_group(f"cells/{name}")
            group["chroms"] = file["chroms"]
            for column in ("chrom", "start", "end"):
                group[f"bins/{column}"] = file[f"bins/{column}"]
            _write_pixels(group, pixels, about)
            check()


def write_cool(
    path: Path,
    bins: pd.DataFrame,
    pixels: pd.DataFrame,
    *,
    assembly: str = UNKNOWN_ASSEMBLY,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a .cool of one map, without balancing weights.

    Args:
        bins: chrom, start, end, in the order of the genome.
        pixels: Of the map.
        assembly: Name of the genome assembly.
        metadata: Written as JSON.

    Raises:
        OSError: Not all could be written, such as on a full disk.
    """
    with new_hdf5(path) as (file, _):
        _write_bins(file, bins)
        _write_pixels(file, pixels, _about(bins, assembly, metadata))


def is_fixed(bins: pd.DataFrame) -> bool:
    """Return whether bins have one width, except the last of a chromosome, and leave nothing out."""
    widths = bins["end"] - bins["start"]
    full = (widths == widths.max()) | (bins["chrom"] != bins["chrom"].shift(-1))
    placed = bins["start"] == bins.groupby("chrom", sort=False).cumcount() * widths.max()
    return bool((full & placed).all())


def _write_bins(group: Any, bins: pd.DataFrame) -> None:
    chroms = bins.groupby("chrom", sort=False)["end"].max()
    _put(group, "chroms/name", chroms.index.to_numpy().astype("S"))
    _put(group, "chroms/length", chroms.to_numpy(np.int32))
    codes = pd.Categorical(bins["chrom"], chroms.index).codes
    numbers = h5py.enum_dtype({name: i for i, name in enumerate(chroms.index)}, basetype=np.int32)
    _put(group, "bins/chrom", codes.astype(np.int32), dtype=numbers)
    for name in ("start", "end"):
        _put(group, f"bins/{name}", bins[name].to_numpy(np.int32))


def _write_pixels(group: Any, pixels: pd.DataFrame, about: dict[str, Any]) -> None:
    for name in ("bin1_id", "bin2_id", "count"):
        _put(group, f"pixels/{name}", pixels[name].to_numpy())
    first = np.searchsorted(pixels["bin1_id"].to_numpy(), np.arange(about["nbins"] + 1))
    _put(group, "indexes/bin1_offset", first)
    offsets = np.searchsorted(group["bins/chrom"][:], np.arange(about["nchroms"] + 1))
    _put(group, "indexes/chrom_offset", offsets)
    kind = {"format": "HDF5::Cooler", "format-version": 3, "storage-mode": "symmetric-upper"}
    group.attrs.update(about | kind | {"nnz": len(pixels), "sum": float(pixels["count"].sum())})


def _put(group: Any, name: str, values: Any, dtype: Any = None) -> None:
    group.create_dataset(name, data=values, dtype=dtype, maxshape=values.shape, **PACKED)


def _about(bins: pd.DataFrame, assembly: str, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the attributes that a file shares with its cells."""
    fixed = is_fixed(bins)
    return {
        "nchroms": bins["chrom"].nunique(),
        "nbins": len(bins),
        "bin-type": "fixed" if fixed else "variable",
        "bin-size": int((bins["end"] - bins["start"]).max()) if fixed else "null",
        "genome-assembly": assembly,
        "metadata": json.dumps(metadata or {}),
        "format-url": URL,
        "generated-by": "lightning-amp",
        "creation-date": datetime.now(UTC).replace(tzinfo=None).isoformat(),
    }
