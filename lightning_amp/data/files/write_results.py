"""Writes what a trained model says about the cells: embeddings as h5ad, expected contacts as scool.

Every file is written under another name and renamed at the end, so that a file of the right name is a whole
one.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_amp.data.files.new_hdf5 import new_hdf5
from lightning_amp.data.files.strata_layout import FeatureLayout, Stratum
from lightning_amp.data.files.write_aside import written_aside
from lightning_amp.data.files.write_h5ad import write_annotations
from lightning_amp.data.files.write_scool import write_scool

CELLTYPE_COLUMNS = ("celltype", "cell_type")


def has_celltypes(obs: pd.DataFrame) -> bool:
    """Return whether the table of cells says their types."""
    return any(name in obs for name in CELLTYPE_COLUMNS)


def celltypes(obs: pd.DataFrame) -> NDArray[np.str_]:
    """Return the cell type of every cell, "Unknown" where the table has none."""
    column = next((name for name in CELLTYPE_COLUMNS if name in obs), None)
    labels = obs[column].astype(str).to_numpy() if column else np.full(len(obs), "Unknown")
    return labels.astype(str)


def write_embedding(path: Path, *, obs: pd.DataFrame, embedding: NDArray[np.float32]) -> None:
    """Write an h5ad without features: the table of cells, and the embedding [cell, dim] as obsm["X_amp"]."""
    from anndata.io import write_elem

    with written_aside(path) as aside, new_hdf5(aside) as (file, _):
        write_elem(file, "obsm", {"X_amp": embedding.astype(np.float32)})
        write_annotations(file, obs=obs, var=pd.DataFrame(index=pd.Index([], dtype=str)), uns={})


def write_imputed(
    out_dir: Path, *, layout: FeatureLayout, contacts: Mapping[str, NDArray[np.float32]]
) -> list[Path]:
    """Write expected contacts (cell name -> [feature]), and return the files: imputed.scool, or, with several
    resolutions,
    imputed_<resolution>.scool each.
    """
    resolutions = list(dict.fromkeys(stratum.resolution for stratum in layout.strata))
    paths = []
    for resolution in resolutions:
        tail = "" if len(resolutions) == 1 else f"_{resolution}"
        strata = [stratum for stratum in layout.strata if stratum.resolution == resolution]
        path = out_dir / f"imputed{tail}.scool"
        with written_aside(path) as aside:
            cells = ((name, _pixels(strata, values)) for name, values in contacts.items())
            write_scool(aside, bin_table(layout, strata[0]), cells, n_cells=len(contacts))
        paths.append(path)
    return paths


def bin_table(layout: FeatureLayout, diagonal: Stratum) -> pd.DataFrame:
    """Return chrom, start and end of the bins of one resolution: the features of its stratum 0."""
    names = layout.anchor_names[diagonal.anchors].tolist()
    chroms, _, spans = zip(*(name.rpartition(":") for name in names), strict=True)
    starts, _, ends = zip(*(span.partition("-") for span in spans), strict=True)
    return pd.DataFrame({"chrom": chroms, "start": np.array(starts, int), "end": np.array(ends, int)})


def _pixels(strata: list[Stratum], values: NDArray[np.float32]) -> pd.DataFrame:
    """Return one cell's features as pixels, sorted as cooler wants them; feature (i, k) is the pair i, i +
    k."""
    first = strata[0].anchors[0]
    bin1 = np.concatenate([stratum.anchors - first for stratum in strata])
    bin2 = np.concatenate([stratum.anchors - first + stratum.k for stratum in strata])
    count = np.concatenate([values[slice(*stratum.columns)] for stratum in strata]).astype(np.float64)
    order = np.lexsort((bin2, bin1))
    return pd.DataFrame({"bin1_id": bin1[order], "bin2_id": bin2[order], "count": count[order]})
