"""Write predictions of a trained model: embeddings as h5ad, expected contacts as scool and cool.

Every file is written under a temporary name and renamed at the end, so that a file of the right name is complete.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import permutations
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_amp.data.files.directory import written_aside
from lightning_amp.data.files.new_hdf5 import UNKNOWN_ASSEMBLY, new_hdf5, new_scool, write_annotations, write_cool
from lightning_amp.data.files.read_h5ad import first_column, open_h5ad
from lightning_amp.data.files.strata_layout import BIN, FeatureLayout, StratumLayout
from lightning_amp.errors import DataError

UNKNOWN = "Unknown"
CELLTYPE_COLUMNS = ("celltype", "cell_type")
PIXEL_BYTES = 24
"""Of two bins and a count, before compression."""
NO_FEATURES = pd.DataFrame(index=pd.Index([], dtype=str))


def celltype_column(obs: pd.DataFrame, key: str | None = None) -> str | None:
    """Return the name of the column of cell types: `key` if given, else a usual one; None if there is none."""
    return next((name for name in ((key,) if key else CELLTYPE_COLUMNS) if name in obs), None)


def labels_of(obs: pd.DataFrame, column: str | None) -> NDArray[np.str_]:
    """Return the labels of a column as text, "Unknown" where they are missing."""
    found: NDArray[np.str_] = first_column(obs, [column] if column else [], UNKNOWN).to_numpy().astype(str)
    return found


def cells_of_types(types: NDArray[np.str_], depth: NDArray[np.float64], names: Iterable[str]) -> list[int]:
    """Return the row of one cell of each of some types, of median depth."""
    found = []
    for name in names:
        rows = np.flatnonzero(types == name)
        found.append(int(rows[np.argsort(depth[rows], kind="stable")[len(rows) // 2]]))
    return found


def read_assembly(hic: Path) -> str:
    """Return the genome assembly that `prepare` has written to a Hi-C h5ad, or "unknown"."""
    with open_h5ad(hic) as file:
        found = file.get("uns/amp/genome_assembly")
        return UNKNOWN_ASSEMBLY if found is None else str(found.asstr()[()])


def write_embedding(
    path: Path,
    *,
    obs: pd.DataFrame,
    parts: Mapping[str, dict[str, Any]],  # obsm and uns
    var: pd.DataFrame = NO_FEATURES,  # table of features
    # rows and their [row, feature], a few cells at a time, for layers["imputed"]; NaN for other cells. There is no
    # layer where this is empty
    imputed: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]] = (),
) -> None:
    """Write an h5ad without X: the tables of cells and features, and the embedding."""
    from anndata.io import write_elem

    with written_aside(path) as aside, new_hdf5(aside) as (file, check):
        for rows, values in imputed:
            if "layers" not in file:
                write_elem(file, "layers", {})
                shape = (len(obs), len(var))
                layer = file.create_dataset("layers/imputed", shape, np.float32, fillvalue=np.nan)
                layer.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
            file["layers/imputed"][rows] = values
            check()
        write_elem(file, "obsm", parts.get("obsm", {}))
        write_annotations(file, obs=obs, var=var, uns=parts.get("uns", {}))


def check_maps(layout: FeatureLayout, cells: Sequence[str]) -> None:
    """Refuse bins without a place, and cells that a .scool, whose groups have their names, would mix up."""
    bins = [name for name in layout.anchor_names.tolist() if BIN.fullmatch(name) is None]
    if bins:
        raise DataError(
            f"contact maps cannot be written of the bins {bins[:3]!r}, which are not named as 'chr1:0-500000'; name the"
            " features of Hi-C so, or write none: contact_map_cells=0, without celltype_key"
        )
    mixed = [name for name, n in Counter(cells).items() if "/" in name or n > 1]
    if mixed:
        raise DataError(
            f"contact maps cannot be written of the cells {mixed[:3]!r}, which are repeated or have a '/'; rename them,"
            " or give contact_map_cells the names of others, or 0"
        )


def write_imputed(
    out_dir: Path,
    *,
    layout: FeatureLayout,
    contacts: Iterable[tuple[str, NDArray[np.float32]]],  # name and [feature] of each cell, read once
    n_cells: int,
    assembly: str = UNKNOWN_ASSEMBLY,
) -> list[Path]:
    """Write expected contacts to imputed.scool, or imputed_<resolution>.scool, a cell at a time; return the files."""
    paths, writers = [], []
    with ExitStack() as files:
        for tail, strata in _resolutions(layout):
            paths.append(out_dir / f"imputed{tail}.scool")
            n_pixels = n_cells * sum(stratum.n_features for stratum in strata)
            aside = files.enter_context(written_aside(paths[-1], partial(mul, n_pixels, PIXEL_BYTES)))
            new = new_scool(aside, bin_table(layout, strata[0]), n_cells=n_cells, assembly=assembly)
            writers.append((strata, files.enter_context(new)))
        for name, values in contacts:
            for strata, add in writers:
                add(name, _pixels(strata, values))
    return paths


def write_pseudobulk(
    out_dir: Path,
    *,
    layout: FeatureLayout,
    sums: Mapping[str, tuple[int, NDArray[np.float64]]],  # cell type -> number of cells and [feature]
    key: str,
    assembly: str = UNKNOWN_ASSEMBLY,
) -> list[Path]:
    """Write the expected contacts of each cell type to <type>.cool, or <type>_<resolution>.cool; return the files."""
    paths = []
    for tail, strata in _resolutions(layout):
        bins = bin_table(layout, strata[0])
        for stem, (label, (n_cells, total)) in zip(_file_stems(sums), sums.items(), strict=True):
            pixels = _pixels(strata, total)
            pixels = pixels[pixels["count"] > 0]
            metadata = {key: label, "cells": n_cells, "count": "sum of the expected contacts of the cells"}
            path = out_dir / f"{stem}{tail}.cool"
            with written_aside(path) as aside:
                write_cool(aside, bins, pixels, assembly=assembly, metadata=metadata)
            paths.append(path)
    return paths


def _file_stems(labels: Iterable[str]) -> list[str]:
    """Return a file name for each label: "L2/3 IT" is L2_3_IT, a second one of this name L2_3_IT_2."""
    taken: list[str] = []
    for label in labels:
        stem = re.sub(r"[^\w.+-]+", "_", label).lstrip(".") or "_"
        names = (stem if i == 1 else f"{stem}_{i}" for i in range(1, len(taken) + 2))
        taken.append(next(name for name in names if name.lower() not in map(str.lower, taken)))
    return taken


def _resolutions(layout: FeatureLayout) -> Iterator[tuple[str, list[StratumLayout]]]:
    """Yield the suffix of the files of each resolution, "" if there is only one, and its strata."""
    resolutions = list(dict.fromkeys(stratum.resolution for stratum in layout.strata))
    for resolution in resolutions:
        strata = [stratum for stratum in layout.strata if stratum.resolution == resolution]
        yield "" if len(resolutions) == 1 else f"_{resolution}", strata


def bin_table(layout: FeatureLayout, diagonal: StratumLayout) -> pd.DataFrame:
    """Return chrom, start and end of the bins of one resolution: the features of its stratum 0."""
    names = layout.anchor_names[diagonal.anchors].tolist()
    chroms, _, spans = zip(*(name.rpartition(":") for name in names), strict=True)
    starts, _, ends = zip(*(span.partition("-") for span in spans), strict=True)
    return pd.DataFrame({"chrom": chroms, "start": np.array(starts, int), "end": np.array(ends, int)})


def _pixels(strata: list[StratumLayout], values: NDArray[Any]) -> pd.DataFrame:
    """Return the features of a map as pixels, sorted; feature (i, k) is the pair i, i + k."""
    first = strata[0].anchors[0]
    bin1 = np.concatenate([stratum.anchors - first for stratum in strata])
    bin2 = np.concatenate([stratum.anchors - first + stratum.k for stratum in strata])
    count = np.concatenate([values[slice(*stratum.columns)] for stratum in strata]).astype(np.float64)
    # strata come one after the other, and cooler finds the pixels of a bin by a search in bin1
    order = np.lexsort((bin2, bin1))
    # a file may pad its strata with pairs whose second bin is beyond the last one
    order = order[bin2[order] < strata[0].n_features]
    return pd.DataFrame({"bin1_id": bin1[order], "bin2_id": bin2[order], "count": count[order]})


NEIGHBOURS = 15
MOST_QUERIES = 2_000
"""Most cells of a modality whose neighbours are searched, evenly spaced; more take time and change little."""
BLOCK = 256


def same_type_share(
    embeddings: Mapping[str, NDArray[np.float32]], types: Mapping[str, NDArray[np.str_]]
) -> tuple[float, float] | None:
    """Return the share of a cell's nearest neighbours in another modality that are of its type, and chance's.

    The mean over pairs of modalities, in both directions, of the mean over cells; neighbours are 15, or all where
    there are fewer. Cells that were not embedded (NaN), or of a type that the other modality has not, do not count.
    Arguments are by modality, [cell, dim] and [cell]; None where no two modalities have a type in common.
    """
    known = {name: np.isfinite(values).all(axis=1) for name, values in embeddings.items()}
    found = []
    for one, other in permutations(embeddings, 2):
        there, there_types = embeddings[other][known[other]], types[other][known[other]]
        rows = np.flatnonzero(known[one] & np.isin(types[one], there_types))
        if not len(rows):
            continue
        queries = rows[np.unique(np.linspace(0, len(rows) - 1, MOST_QUERIES).astype(int))]
        same = types[one][queries, None] == there_types
        nearest = _nearest(embeddings[one][queries], there, min(NEIGHBOURS, len(there)))
        found.append((np.take_along_axis(same, nearest, axis=1).mean(), same.mean()))
    if not found:
        return None
    share, chance = np.mean(found, axis=0)
    return float(share), float(chance)


def _nearest(points: NDArray[np.float32], others: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """Return the rows of the n of `others` that are nearest to each point, in no order, [point, neighbour]."""
    there = others.astype(np.float64)
    squares = (there**2).sum(axis=1)
    found = []
    for start in range(0, len(points), BLOCK):
        # squared distances but for what is the same for all others
        # in float64: the difference of large squares that are nearly equal has few digits left in float32
        far = squares - 2 * points[start : start + BLOCK].astype(np.float64) @ there.T
        found.append(np.argpartition(far, n - 1, axis=1)[:, :n])
    return np.concatenate(found)


def describe_embedding(embedding: NDArray[np.float32]) -> dict[str, dict[str, Any]]:
    """Return obsm and uns of an embedding [cell, dim], NaN for a cell that was not predicted.

    These are obsm["X_amp"] and obsm["X_pca"], and the variances in uns["pca"].
    """
    known = np.isfinite(embedding).all(axis=1)
    scores, variances = principal_components(embedding[known].astype(np.float64))
    pca = np.full((len(embedding), scores.shape[1]), np.nan, dtype=np.float32)
    pca[known] = scores
    ratio = variances / max(variances.sum(), np.finfo(np.float64).tiny)
    about = {"variance": variances, "variance_ratio": ratio, "params": {"use_rep": "X_amp"}}
    return {"obsm": {"X_amp": embedding.astype(np.float32), "X_pca": pca}, "uns": {"pca": about}}


def principal_components(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scores [cell, component] and variances [component] of x [cell, dim], largest first."""
    centred = x - x.mean(axis=0) if len(x) else x
    # of [dim, dim], which is small: there are far more cells than dims
    axes, squares, _ = np.linalg.svd(centred.T @ centred)
    # the largest loading is positive, so that every run and machine has the same signs
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    return centred @ axes, squares / max(len(x) - 1, 1)
