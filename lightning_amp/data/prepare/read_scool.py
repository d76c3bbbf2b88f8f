"""Read single-cell Hi-C from a .scool file; convert names of bin widths and of chromosomes.

Accepted: one fixed-width bin table shared by all cells, symmetric-upper pixels, whole non-negative counts.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from lightning_amp.data.files.new_hdf5 import UNKNOWN_ASSEMBLY, is_fixed
from lightning_amp.data.files.read_h5ad import fault_of_counts, open_hdf5
from lightning_amp.errors import DataError

PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(bp|kb|mb)?", re.IGNORECASE)
UNITS = {"bp": 1, "kb": 1_000, "mb": 1_000_000}


def parse_resolution(resolution: int | str) -> int:
    """Return the bin width in base pairs of a number or a text such as "500kb", "1mb", "2500"."""
    width = _width(str(resolution).strip())
    if width < 1 or width != int(width):
        raise DataError(
            f"resolution {resolution!r} is not a bin width; write base pairs (500000) or a text like '500kb', '1mb'"
        )
    return int(width)


def format_resolution(width: int) -> str:
    """Return the name of a bin width given in base pairs: 1000000 is "1000kb", as in HiGLUE's file names."""
    return f"{width / 1000:.10g}kb"


def strip_resolution(cell: str, *, resolution: int) -> str:
    """Return a cell's name without a ".cool" ending and without a suffix that names this resolution, in base pairs.

    Only a suffix equal to the resolution goes ("a.500kb" at 500000), so other dots in names are safe.
    """
    name = cell.removesuffix(".cool")
    stem, _, suffix = name.rpartition(".")
    if stem and _width(suffix) == resolution:
        return stem
    return name


def _width(text: str) -> float:
    """Base pairs; 0 for a text that is no resolution."""
    match = PATTERN.fullmatch(text)
    return float(match[1]) * UNITS[(match[2] or "bp").lower()] if match else 0.0


NUCLEAR = re.compile(r"\d{1,2}[A-Z]?|[IVX]{1,5}|[XYWZ]|NC_(?!012920|005089|001665)\d+\.\d+")
"""Bare names of chromosomes: numbers, with arms, Roman ones, sex chromosomes, and those of RefSeq but the mitochondrial
ones of man, mouse and rat."""


def bare_name(chrom: str) -> str:
    """Return the name without "chr", the mitochondrial one as "M", so that two spellings compare equal."""
    name = chrom[3:] if chrom.lower().startswith("chr") else chrom
    return "M" if name == "MT" else name


def spell_as(reference: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return the reference's spelling of each name that is in the reference."""
    spelling = {bare_name(chrom): chrom for chrom in reference}
    return {name: spelling[bare_name(name)] for name in names if bare_name(name) in spelling}


def choose_chromosomes(chosen: Sequence[str] | None, present: Sequence[str], *, path: object) -> list[str]:
    """Return the chromosomes to keep, in the spelling and order of those present in the file.

    Chosen names may be written with or without "chr"; None keeps all but scaffolds and the mitochondrial one, or all if
    no name is a known chromosome's.
    """
    if chosen is None:
        return [chrom for chrom in present if NUCLEAR.fullmatch(bare_name(chrom))] or list(present)
    spelled = spell_as(present, chosen)
    unknown = [name for name in chosen if name not in spelled]
    if unknown or not chosen:
        raise DataError(
            f"{path}: chromosomes={list(chosen)!r} was given, of which {unknown!r} are not in the file; it "
            f"has {list(present)[:30]!r}"
        )
    return [chrom for chrom in present if chrom in spelled.values()]


PIXELS = ["bin1_id", "bin2_id", "count"]


@dataclass(slots=True)
class ScoolFile:
    """A .scool file; keeps its path, no handle."""

    path: Path
    cells: list[str] = field(init=False)  # names of the cells as in the file, in natural order
    bins: pd.DataFrame = field(init=False)  # chrom (str), start and end (int64, base pairs, half-open), in file order
    # name of the genome assembly in the attributes of the file or its first cell, else "unknown"
    assembly: str = field(init=False, default=UNKNOWN_ASSEMBLY)

    def __post_init__(self) -> None:
        from cooler.util import natsorted

        with open_hdf5(self.path, what=".scool file") as file:
            _check_kind(file, self.path)
            self.cells = natsorted(file["cells"])
            self.bins = _read_bins(file)
            for group in (file["cells"][self.cells[0]], file):
                found = group.attrs.get("genome-assembly", UNKNOWN_ASSEMBLY)
                found = found.decode() if isinstance(found, bytes) else str(found)
                self.assembly = self.assembly if found == UNKNOWN_ASSEMBLY else found

    def named_cells(self) -> dict[str, str]:
        """Return the clean name of every cell (no ".500kb", no ".cool") and its name in the file."""
        resolution = self.resolution()
        named: dict[str, str] = {}
        for cell in self.cells:
            name = strip_resolution(cell, resolution=resolution)
            if name in named:
                raise DataError(
                    f"{self.path}: the cells {named[name]!r} and {cell!r} have the same name {name!r} once "
                    "the resolution is taken off; rename one of them"
                )
            named[name] = cell
        return named

    def n_pixels(self) -> int:
        """Return the number of pixels of all cells."""
        with open_hdf5(self.path, what=".scool file") as file:
            return sum(int(cell["pixels/count"].shape[0]) for cell in file["cells"].values())

    def resolution(self) -> int:
        """Return the bin width in base pairs."""
        widths = self.bins["end"] - self.bins["start"]
        if not is_fixed(self.bins):
            last = self.bins["chrom"] != self.bins["chrom"].shift(-1)
            raise DataError(
                f"{self.path}: the bins are of variable width (found {sorted(widths[~last].unique().tolist())[:4]!r}"
                " bp) or leave some out; bins of one width are needed, bin the contacts again at one resolution"
            )
        return int(widths.max())

    def iterate(self, cells: Iterable[str], own: slice | None = None) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield name and pixels (bin1_id <= bin2_id and count) of each cell, by its name in the file, opened once.

        `own`: only pixels whose bin1_id is one of these bins; None is all.
        """
        from cooler import Cooler

        with open_hdf5(self.path, what=".scool file") as file:
            for cell in cells:
                where = f"{self.path}: cell {cell!r}"
                group = file["cells"].get(cell)
                if group is None:
                    raise DataError(f"{where} is not in the file, found e.g. {self.cells[:3]!r}; use one of `cells`")
                self._check_cell(group, where)
                # pixels are sorted by their first bin, so those of a run of bins are a run
                offset = group["indexes/bin1_offset"]
                run = (0, None) if own is None else (int(offset[own.start]), int(offset[own.stop]))
                table = Cooler(group).pixels()[PIXELS][slice(*run)]
                _check_pixels(table, len(self.bins), where)
                yield cell, table

    def _check_cell(self, group: Any, where: str) -> None:
        """Refuse a cell with other bins than the file's, or stored in another way."""
        needed = ("bins/start", "chroms/name", "pixels/count", "indexes/bin1_offset")
        missing = [name for name in needed if name not in group]
        if missing:
            raise DataError(f"{where} has no {missing!r}; the file is not complete, write it again")
        # Linked tables are the same HDF5 object, so no cell need be compared bin by bin.
        linked = all(group[name] == group.file[name] for name in ("bins/start", "chroms/name"))
        if not linked and not (own := _read_bins(group)).equals(self.bins):
            raise DataError(
                f"{where} has {len(own)!r} bins on chromosomes {sorted(set(own['chrom']))[:3]!r}, which differ from"
                f" the file's {len(self.bins)!r} on {sorted(set(self.bins['chrom']))[:3]!r}; all cells need one"
                " assembly and one resolution"
            )
        mode = group.attrs.get("storage-mode", "symmetric-upper")
        if mode != "symmetric-upper":
            raise DataError(f"{where} has storage-mode {mode!r}; 'symmetric-upper' is needed, write it so with cooler")


def _check_kind(file: Any, path: Path) -> None:
    """Refuse every HDF5 file that is no .scool, and name what it is."""
    advice = "write one with cooler.create_scool"
    found, missing = "", [n for n in ("chroms/name", "bins/chrom", "bins/start", "bins/end") if n not in file]
    if "resolutions" in file:
        found = "expected a .scool, found a .mcool (bulk, many resolutions)"
    elif "pixels" in file:
        found = "expected a .scool, found a .cool (one bulk matrix)"
    elif "cells" not in file and any(isinstance(g, h5py.Group) and "pixels" in g for g in file.values()):
        found = f"cells are at the root of the file ({sorted(file)[:3]!r}), where cooler before 0.8.9 wrote them"
    elif "cells" not in file:
        found = f"expected a .scool, found an HDF5 file with {sorted(file)[:5]!r}"
    elif missing:
        found = f"the .scool has no {missing!r}"
    elif len(file["cells"]) == 0:
        found = "the .scool has no cells"
    elif len(file["bins/start"]) == 0:
        found = "the .scool has no bins"
    if found:
        raise DataError(f"{path}: {found}; {advice}")


def _read_bins(group: Any) -> pd.DataFrame:
    from cooler.api import bins

    table = bins(group, fields=["chrom", "start", "end"])
    return table.assign(chrom=table["chrom"].astype(str).astype(object)).astype({"start": "int64", "end": "int64"})


def _check_pixels(table: pd.DataFrame, n_bins: int, where: str) -> None:
    fault = fault_of_counts(table["count"].to_numpy())
    if fault:
        raise DataError(
            f"{where} has a {fault[0]} count {fault[1]!r}; raw contact counts are needed, not balanced or imputed ones"
        )
    first, second = table["bin1_id"].to_numpy(), table["bin2_id"].to_numpy()
    bad = np.flatnonzero((first < 0) | (second >= n_bins) | (first > second))
    if len(bad):
        pair = (int(first[bad[0]]), int(second[bad[0]]))
        raise DataError(f"{where} has a pixel of bins {pair!r}; bin1 <= bin2 < {n_bins!r} is needed, write it again")
