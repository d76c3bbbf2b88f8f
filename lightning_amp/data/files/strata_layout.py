"""Read the columns and bins of each stratum of a Hi-C h5ad from its `var`.

Features are stratum-major: all bins (stratum 0), then all pairs at distance 1, and so on; with several
resolutions, coarse to fine, each with its own strata. Either `var` has columns `stratum` and `anchor` (integers as
`prepare` writes them, or bin names together with a column `res` as in HiGLUE's multi-resolution files), or strata and
anchors are parsed from the feature names.
"""

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_integer_dtype

from lightning_amp.data.files.read_h5ad import names_of, open_h5ad, read_strings
from lightning_amp.errors import DataError

BLOCK = 65_536
"""Names that are in memory at a time."""
BIN = re.compile(r".+:\d+-\d+")


@dataclass(frozen=True, slots=True, eq=False)
class StratumLayout:
    """One stratum: the pairs (bin i, bin i + k) of one resolution."""

    k: int  # distance of the two bins, in bins
    resolution: str | None  # name of the resolution, or None in a file with a single one
    start: int  # with stop: first column in the matrix, and the one after the last
    stop: int
    # row of each feature's first bin among all anchors, of shape [feature of the stratum]
    anchors: NDArray[np.int64]

    @property
    def columns(self) -> tuple[int, int]:
        """First column and the column after the last."""
        return self.start, self.stop

    @property
    def n_features(self) -> int:
        """Number of features."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class FeatureLayout:
    """The strata of a Hi-C modality in the order of its columns, and the names of its anchors.

    Anchors of several resolutions are numbered one after another; a bin as long as its chromosome can bear
    the same name at two resolutions and is then two anchors.
    """

    strata: tuple[StratumLayout, ...]
    anchor_names: NDArray[np.str_]  # names of the stratum-0 bins, of shape [anchor]

    @property
    def n_strata(self) -> int:
        """Number of strata over all resolutions."""
        return len(self.strata)

    @property
    def n_anchors(self) -> int:
        """Number of anchors over all resolutions."""
        return len(self.anchor_names)

    @property
    def n_features(self) -> int:
        """Number of columns of the matrix."""
        return self.strata[-1].stop


def feature_name(chrom: str, start: int, end: int, stratum: int) -> str:
    """Return the name of the pair of a bin (0-based, half-open) with the one `stratum` bins on; of stratum 0, the
    bin's.
    """
    return f"{chrom}:{start}-{end}" if stratum == 0 else f"{chrom}:{start}-{end}-{stratum}"


def read_layout(h5ad_path: str | Path) -> FeatureLayout:
    """Read the layout of a Hi-C h5ad."""
    # imported late: it takes half a second
    from anndata.io import read_elem

    path = Path(h5ad_path)
    with open_h5ad(path) as file:
        var, names = file["var"], names_of(file["var"])
        if len(names) == 0:
            raise DataError(f"{path}: the file has no features (var is empty); prepare it again")
        # only what is needed: a table of 3.6 million features takes a gigabyte
        column = {}
        for name in {"res", "stratum", "anchor"} & set(var):
            # anndata 0.7 keeps the categories of a column elsewhere
            categories = var[name].attrs.get("categories")
            column[name] = (
                read_elem(var[name])
                if categories is None
                else pd.Categorical.from_codes(var[name][:], read_strings(file[categories]))
            )
        labels: list[str | None] = [None]
        resolution = np.zeros(len(names), dtype=np.int64)
        if "res" in column:
            resolution, found = pd.factorize(column["res"])
            labels = [str(label) for label in found]
        try:
            if len(column.keys() & {"stratum", "anchor"}) == 2 and is_integer_dtype(column["stratum"].dtype):
                stratum = np.asarray(column["stratum"], dtype=np.int64)
                anchor = pd.factorize(column["anchor"])[0].astype(np.int64)
            elif "res" in column:
                raise DataError(
                    f"var has a column 'res' but no integer 'stratum' with 'anchor'; found columns {sorted(var)!r}; "
                    "a file of several resolutions needs all three"
                )
            else:
                blocks = (read_strings(names, start=i, stop=i + BLOCK) for i in range(0, len(names), BLOCK))
                stratum, anchor = parse_names(chain.from_iterable(blocks))
            return _assemble(names, resolution, labels, stratum, anchor)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error


def parse_names(names: Iterable[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stratum and the anchor of every feature name, [feature] each, anchors in the order of stratum 0."""
    anchors: dict[str, int] = {}
    strata, rows = array("q"), array("q")
    for name in names:
        # the name of a bin ends in "-END" too: only if what is before the last "-" is a known bin, it is a pair
        bin_name, _, k = name.rpartition("-")
        row = anchors.get(bin_name)
        if row is not None:
            if not k.isdigit():
                raise DataError(f"feature name {name!r} ends in no stratum; expected e.g. 'chr1:0-500000-3'")
            strata.append(int(k))
            rows.append(row)
            continue
        if BIN.fullmatch(name) is None:
            raise DataError(
                f"feature name {name!r} does not parse, or its bin is not in stratum 0; expected 'chr1:0-500000' "
                "for a bin and 'chr1:0-500000-3' for its pair with the third bin after it, all bins first"
            )
        if name in anchors:
            raise DataError(f"the bin {name!r} is listed twice in stratum 0; feature names must be unique")
        strata.append(0)
        rows.append(len(anchors))
        anchors[name] = len(anchors)
    return np.asarray(strata), np.asarray(rows)


def _assemble(
    names: Any,
    resolution: NDArray[np.int64],
    labels: list[str | None],
    stratum: NDArray[np.int64],
    anchor: NDArray[np.int64],
) -> FeatureLayout:
    """Cut the features into strata and number the anchors; all codes are of shape [feature]."""
    strata: list[StratumLayout] = []
    anchor_names: list[str] = []
    row_of = np.full(int(anchor.max()) + 1, -1)
    # a new stratum begins where either code changes: the last of one resolution and the first of the next are both 0
    # where a resolution has one stratum only
    ends = np.flatnonzero(np.diff(resolution) | np.diff(stratum)) + 1
    for start, stop in pairwise([0, *ends.tolist(), len(stratum)]):
        k, label, own = int(stratum[start]), labels[int(resolution[start])], anchor[start:stop]
        expected = strata[-1].k + 1 if strata and strata[-1].resolution == label else 0
        if k != expected or any((s.k, s.resolution) == (k, label) for s in strata):
            where = "" if label is None else f" of resolution {label!r}"
            raise DataError(
                f"expected stratum {expected}{where}, found stratum {k}; strata must be 0, 1, 2, ... without a gap:"
                " sort var by resolution, stratum, anchor"
            )
        if k == 0:
            if own.min() < 0 or len(np.unique(own)) != len(own):
                raise DataError("stratum 0 lists a bin twice or without a name; every bin must be listed exactly once")
            # bins of the resolution before may bear the same names, and are none of this one
            row_of[:] = -1
            row_of[own] = np.arange(len(anchor_names), len(anchor_names) + len(own))
            anchor_names += read_strings(names, start=start, stop=stop)
        lost = np.flatnonzero((own < 0) | (row_of[own] < 0))
        if len(lost):
            name = read_strings(names, start=start + int(lost[0]), stop=start + int(lost[0]) + 1)[0]
            raise DataError(
                f"the feature {name!r} of stratum {k} has a bin that stratum 0 does not list; keep all bins"
            )
        strata.append(StratumLayout(k, label, start, stop, row_of[own]))
    return FeatureLayout(tuple(strata), np.array(anchor_names, dtype=np.str_))
