"""Reads single-cell Hi-C from a .scool file (cooler's container of one contact matrix per cell).

Accepted: one fixed-width bin table shared by all cells, symmetric-upper pixels, whole non-negative counts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from lightning_amp.data.files.hdf5 import open_hdf5, read_strings
from lightning_amp.data.files.raw_counts import fault_of_counts
from lightning_amp.data.files.resolution import strip_resolution
from lightning_amp.data.files.write_cooler import UNKNOWN_ASSEMBLY
from lightning_amp.errors import DataError

PIXELS = ["bin1_id", "bin2_id", "count"]


@dataclass(frozen=True, slots=True)
class ScoolFile:
    """A .scool file; keeps its path, no handle.

    Raises:
        DataError: The file is absent, damaged, or another kind of file.
    """

    path: Path

    def __post_init__(self) -> None:
        with open_hdf5(self.path, what=".scool file") as file:
            _check_kind(file, self.path)

    def cells(self) -> list[str]:
        """Return the names of the cells as the file writes them, in natural order."""
        with open_hdf5(self.path, what=".scool file") as file:
            return sorted(file["cells"], key=_natural_key)

    def named_cells(self) -> dict[str, str]:
        """Return the clean name of every cell (no ".500kb", no ".cool") and the name the file writes.

        Raises:
            DataError: Two cells have the same clean name.
        """
        resolution = self.resolution()
        named: dict[str, str] = {}
        for cell in self.cells():
            name = strip_resolution(cell, resolution=resolution)
            if name in named:
                raise DataError(
                    f"{self.path}: the cells {named[name]!r} and {cell!r} have the same name {name!r} once "
                    "the resolution is taken off; rename one of them"
                )
            named[name] = cell
        return named

    def bins(self) -> pd.DataFrame:
        """Return the bin table: chrom (str), start, end (int64, base pairs, half-open), in file order."""
        with open_hdf5(self.path, what=".scool file") as file:
            return _read_bins(file)

    def resolution(self) -> int:
        """Return the bin width in base pairs.

        Raises:
            DataError: The bins are not all of one width.
        """
        bins = self.bins()
        width = int((bins["end"] - bins["start"]).max())
        last = (bins["chrom"] != bins["chrom"].shift(-1)).to_numpy()
        aligned = (bins["start"] % width == 0) & ((bins["end"] - bins["start"] == width) | last)
        if not aligned.all():
            found = sorted((bins["end"] - bins["start"])[~last].unique().tolist())[:4]
            raise DataError(
                f"{self.path}: the bins are of variable width (found {found!r} bp); fixed-width bins are "
                "needed, bin the contacts again at one resolution"
            )
        return width

    def assembly(self) -> str:
        """Return the name of the genome assembly in the attributes of the file or its first cell, else "unknown"."""
        with open_hdf5(self.path, what=".scool file") as file:
            for group in (file, file["cells"][self.cells()[0]]):
                found = group.attrs.get("genome-assembly", UNKNOWN_ASSEMBLY)
                found = found.decode() if isinstance(found, bytes) else str(found)
                if found != UNKNOWN_ASSEMBLY:
                    return found
        return UNKNOWN_ASSEMBLY

    def pixels(self, cell: str) -> pd.DataFrame:
        """Return the contacts, bin1_id <= bin2_id and count, of the cell that the file calls so.

        Raises:
            DataError: No such cell, other bins than the file's, or counts that are no counts.
        """
        return next(self.iterate([cell]))[1]

    def iterate(self, cells: Iterable[str], own: slice | None = None) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield name and pixels of each of the cells, opening the file once; errors as in `pixels`.

        Args:
            cells: Names, as the file writes them.
            own: Bins whose pixels alone are read, those with bin1_id among them; None is all.
        """
        # cooler takes a second to import and only reading contacts needs it.
        from cooler.api import pixels

        with open_hdf5(self.path, what=".scool file") as file:
            bins = _read_bins(file)
            for cell in cells:
                where = f"{self.path}: cell {cell!r}"
                group = file["cells"].get(cell)
                if group is None:
                    some = sorted(file["cells"], key=_natural_key)[:3]
                    raise DataError(
                        f"{where} is not in the file, found e.g. {some!r}; use a name from cells()"
                    )
                _check_cell(group, file, bins, where)
                offset = group["indexes/bin1_offset"]
                run = (0, None) if own is None else (int(offset[own.start]), int(offset[own.stop]))
                table = pixels(group, *run, fields=PIXELS, join=False)
                _check_pixels(table, len(bins), where)
                yield cell, table


def _natural_key(text: str) -> list[tuple[bool, int, str]]:
    """Sort key under which cell_2 comes before cell_10."""
    parts = re.split(r"(\d+)", text)
    return [(True, int(p), "") if p.isdigit() else (False, 0, p) for p in parts]


def _check_kind(file: Any, path: Path) -> None:
    """Refuse every HDF5 file that is no .scool, by the name of what it is."""
    advice = "write one with cooler.create_scool"
    if "resolutions" in file:
        raise DataError(f"{path}: asked for a .scool, found a .mcool (bulk, many resolutions); {advice}")
    if "pixels" in file:
        raise DataError(f"{path}: asked for a .scool, found a .cool (one bulk matrix); {advice}")
    if "cells" not in file:
        if any(isinstance(g, h5py.Group) and "pixels" in g for g in file.values()):
            raise DataError(
                f"{path}: cells lie at the root of the file ({sorted(file)[:3]!r}), as cooler before 0.8.9 "
                f"wrote it; {advice} of a current cooler"
            )
        raise DataError(f"{path}: asked for a .scool, found an HDF5 file with {sorted(file)[:5]!r}; {advice}")
    missing = [n for n in ("chroms/name", "bins/chrom", "bins/start", "bins/end") if n not in file]
    if missing:
        raise DataError(f"{path}: the .scool has no {missing!r}; it is not complete, {advice}")
    if len(file["cells"]) == 0:
        raise DataError(f"{path}: the .scool has no cells; it is not complete, {advice}")
    if len(file["bins/start"]) == 0:
        raise DataError(f"{path}: the .scool has no bins; it is not complete, {advice}")


def _read_bins(group: Any) -> pd.DataFrame:
    names = np.array(read_strings(group["chroms/name"]), dtype=object)
    return pd.DataFrame(
        {
            "chrom": names[group["bins/chrom"][:]],
            "start": group["bins/start"][:].astype(np.int64),
            "end": group["bins/end"][:].astype(np.int64),
        }
    )


def _check_cell(group: Any, file: Any, bins: pd.DataFrame, where: str) -> None:
    """Refuse a cell with other bins than the file's, or stored in another way."""
    missing = [
        n for n in ("bins/start", "chroms/name", "pixels/count", "indexes/bin1_offset") if n not in group
    ]
    if missing:
        raise DataError(f"{where} has no {missing!r}; the file is not complete, write it again")
    # Linked tables are the same HDF5 object, so no cell need be compared bin by bin.
    linked = group["bins/start"] == file["bins/start"] and group["chroms/name"] == file["chroms/name"]
    if not linked and not _read_bins(group).equals(bins):
        raise DataError(
            f"{where} has {len(group['bins/start'])!r} bins on chromosomes "
            f"{sorted(set(_read_bins(group)['chrom']))[:3]!r}, which differ from the file's {len(bins)!r} on "
            f"{sorted(set(bins['chrom']))[:3]!r}; all cells need one assembly and one resolution"
        )
    mode = group.attrs.get("storage-mode", "symmetric-upper")
    if mode != "symmetric-upper":
        raise DataError(
            f"{where} has storage-mode {mode!r}; 'symmetric-upper' is needed, write it so with cooler"
        )


def _check_pixels(table: pd.DataFrame, n_bins: int, where: str) -> None:
    """Refuse counts that are not whole and non-negative, and bins that do not exist."""
    fault = fault_of_counts(table["count"].to_numpy())
    if fault:
        raise DataError(
            f"{where} has a {fault[0]} count {fault[1]!r}; raw contact counts are needed, not balanced or imputed ones"
        )
    first, second = table["bin1_id"].to_numpy(), table["bin2_id"].to_numpy()
    bad = np.flatnonzero((first < 0) | (second >= n_bins) | (first > second))
    if len(bad):
        pair = (int(first[bad[0]]), int(second[bad[0]]))
        raise DataError(
            f"{where} has a pixel of bins {pair!r}; bin1 <= bin2 < {n_bins!r} is needed, write it again"
        )
