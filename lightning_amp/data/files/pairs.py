"""Match the cells of several modalities by their barcodes, for data that measured all of them in the same cells."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_amp.data.files.read_h5ad import open_h5ad
from lightning_amp.errors import DataError

PAIRED = "uns/amp/paired"
"""Where `prepare` notes in a file that its cells are paired."""
SHOWN = 3


def check_pairs(barcodes: Mapping[str, Sequence[str]]) -> None:
    """Refuse barcodes that are repeated, or that one modality has and another has not.

    Args:
        barcodes: The names of all cells, by what has them, such as the path of a file.
    """
    found = {what: pd.Index(names, dtype=object) for what, names in barcodes.items()}
    for what, names in found.items():
        if names.has_duplicates:
            again = names[names.duplicated()].unique().tolist()
            raise DataError(
                f"{what}: paired cells need unique barcodes, and {len(again):,} are repeated, e.g. {again[:SHOWN]!r};"
                " make them unique, such as by the name of the sample, in all modalities alike"
            )
    first, *others = found
    for other in others:
        for one, two in ((first, other), (other, first)):
            alone = found[one].difference(found[two], sort=False).tolist()
            if alone:
                raise DataError(
                    f"{one}: {len(alone):,} of its {len(found[one]):,} barcodes are not in {two}, e.g."
                    f" {alone[:SHOWN]!r}; there, barcodes are e.g. {found[two][:SHOWN].tolist()!r}. Paired cells need"
                    " the same barcodes in all modalities: rename or remove these cells, or prepare without pairs"
                )


def is_paired(paths: Mapping[str, Path]) -> bool:
    """Return whether `prepare` has noted in all files that their cells are paired; one modality has no pairs."""
    return len(paths) > 1 and all(_noted(path) for path in paths.values())


def _noted(path: Path) -> bool:
    with open_h5ad(path) as file:
        return PAIRED in file and bool(file[PAIRED][()])


def matched_rows(barcodes: Mapping[str, NDArray[np.str_]]) -> dict[str, NDArray[np.int64]]:
    """Return the rows of the cells that all modalities have, in the order of the first one, by modality."""
    names = {modality: pd.Index(own) for modality, own in barcodes.items()}
    first, *others = names.values()
    common = first
    for other in others:
        common = common[common.isin(other)]
    return {modality: own.get_indexer(common).astype(np.int64) for modality, own in names.items()}
