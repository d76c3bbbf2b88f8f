"""Reads raw RNA counts and writes the RNA modality."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from lightning_amp.data.files.new_hdf5 import new_hdf5, write_annotations
from lightning_amp.data.files.read_h5ad import fault_of_counts, open_h5ad
from lightning_amp.errors import DataError

CELL_COLUMNS = {"celltype": (("celltype", "cell_type"), "Unknown"), "batch": (("batch",), "0")}


@dataclass(frozen=True, slots=True, eq=False)
class RnaCounts:
    """Raw counts as read.

    Attributes:
        counts: CSR array of shape [cell, gene], float32.
        obs: celltype and batch, then all other columns of the file, indexed by cell.
        genes: Symbols, of shape [gene].
    """

    counts: Any
    obs: pd.DataFrame
    genes: pd.Index
    source: str


def read_rna(path: str | Path) -> RnaCounts:
    """Read raw counts from layers["counts"] of an h5ad, else from X.

    Raises:
        DataError: No h5ad, no whole non-negative counts, or repeated cells or genes.
    """
    from anndata.io import read_elem

    path = Path(path)
    with open_h5ad(path) as file:
        place = "layers/counts" if "layers" in file and "counts" in file["layers"] else "X"
        if place not in file:
            raise DataError(
                f"{path}: neither layers['counts'] nor X found; write raw counts into one of them"
            )
        others = [f"layers[{name!r}]" for name in file.get("layers", ()) if name != "counts"]
        others += ["raw.X"] if "raw" in file and place == "X" else []
        counts = sp.csr_array(read_elem(file[place]))
        obs, var = read_elem(file["obs"]), read_elem(file["var"])
    if counts.shape != (len(obs), len(var)):
        raise DataError(
            f"{path}: {place} has shape {counts.shape!r}, obs and var {(len(obs), len(var))!r}; rewrite it"
        )
    check_raw(counts, obs.index, var.index, where=str(path), place=place, others=others)
    return RnaCounts(counts.astype(np.float32), _cell_columns(obs), var.index.astype(str), str(path))


def check_raw(
    counts: Any,
    cells: pd.Index,
    features: pd.Index,
    *,
    where: str,
    place: str,
    feature: str = "gene",
    others: Sequence[str] = (),
) -> None:
    """Refuse values that are no raw counts, and repeated names.

    Args:
        counts: CSR array of shape [cell, feature].
        cells, features: Their names.
        where, place: The file or object, and the place of the counts in it, for messages.
        feature: What a feature is called in messages.
        others: Other places of the file or object that may hold the counts, for messages.

    Raises:
        DataError: One of these.
    """
    fault = fault_of_counts(counts.data)
    if fault:
        raise DataError(
            f"{where}: {place} has {fault[0]} values (e.g. {fault[1]!r}), so it holds no raw counts; put raw "
            "counts into layers['counts'] (scaled or normalised values cannot be used)"
            + (f"; other matrices of the file are {', '.join(others)}" if others else "")
        )
    for names, what in ((cells, "cell"), (features, feature)):
        if names.has_duplicates:
            again = names[names.duplicated()].unique().tolist()
            raise DataError(
                f"{where}: {what} names are repeated: {again[:3]!r} ({len(again)}); make them unique"
            )


def _cell_columns(obs: pd.DataFrame) -> pd.DataFrame:
    columns = {}
    for name, (sources, default) in CELL_COLUMNS.items():
        source = next((s for s in sources if s in obs), None)
        found = None if source is None else obs[source].astype(object)
        columns[name] = (
            default if found is None else found.where(found.notna(), default).astype(str).to_numpy()
        )
    known = pd.DataFrame(columns, index=obs.index.astype(str))
    return known.join(obs.drop(columns=list(columns), errors="ignore").set_axis(known.index))


def write_rna(path: Path, rna: RnaCounts, positions: pd.DataFrame, *, settings: dict[str, Any]) -> None:
    """Write the RNA modality; cells without a count in the genes kept are dropped and counted.

    Positions are chrom, start, end, strand of the genes in their order; settings go to `uns["amp"]`.
    """
    from anndata.io import write_elem

    filled = rna.counts.sum(axis=1) > 0
    counts = sp.csr_matrix(rna.counts[filled], dtype=np.float32)
    var = positions.rename(columns={"start": "chromStart", "end": "chromEnd"}).rename_axis(None)
    var = var[["chrom", "chromStart", "chromEnd", "strand"]].assign(highly_variable=True, in_hic=True)
    with new_hdf5(path) as (file, _):
        write_elem(file, "X", counts)
        write_elem(file, "layers", {"counts": counts})
        amp = settings | {"schema": 1, "n_dropped_cells": int((~filled).sum())}
        amp["genes"] = positions.attrs.get("genes", {})
        write_annotations(file, obs=rna.obs[filled], var=var, uns={"amp": amp})
