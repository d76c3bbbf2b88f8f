"""Where each stratum of a Hi-C h5ad lies: read from `var` only, the matrix is never touched.

Features are stratum-major: all bins (stratum 0), then all pairs at distance 1, and so on; with several
resolutions, coarse to fine, each with its own strata. Two kinds of var are understood: columns `stratum` and
`anchor` (integers as `prepare` writes them, or bin names beside a column `res` as HiGLUE's multi-resolution
files have them), or the feature names alone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_amp.data.files.hdf5 import index_of, is_integer, open_h5ad, read_factor, read_strings
from lightning_amp.errors import DataError

BLOCK = 65_536
BIN = re.compile(rb".+:\d+-\d+")


@dataclass(frozen=True, slots=True, eq=False)
class Stratum:
    """One stratum: the pairs (bin i, bin i + k) of one resolution.

    Attributes:
        k: Distance of the two bins, in bins.
        resolution: Name of the resolution, or None in a file with a single one.
        start, stop: First column in the matrix, and the one after the last.
        anchors: Row of each feature's first bin among all anchors, of shape [feature of the stratum].
    """

    k: int
    resolution: str | None
    start: int
    stop: int
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

    Attributes:
        anchor_names: Names of the stratum-0 bins, of shape [anchor].
    """

    strata: tuple[Stratum, ...]
    anchor_names: NDArray[np.str_]

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
    bin's."""
    return f"{chrom}:{start}-{end}" if stratum == 0 else f"{chrom}:{start}-{end}-{stratum}"


def read_layout(h5ad_path: str | Path) -> FeatureLayout:
    """Read the layout of a Hi-C h5ad.

    Raises:
        DataError: No h5ad, names that do not parse, features not stratum-major, or a stratum left out.
    """
    path = Path(h5ad_path)
    with open_h5ad(path) as file:
        var = file["var"]
        names = index_of(var)
        if len(names) == 0:
            raise DataError(f"{path}: the file has no features (var is empty); prepare it again")
        try:
            return _assemble(names, *_columns(var, names))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error


def _columns(
    var: Any, names: Any
) -> tuple[NDArray[np.int64], list[str | None], NDArray[np.int64], NDArray[np.int64]]:
    """Return resolution codes, their labels, strata and anchor codes of all features."""
    if "res" in var:
        res, found = read_factor(var["res"])
        labels: list[str | None] = list(found)
    else:
        res, labels = np.zeros(len(names), dtype=np.int64), [None]
    if "stratum" in var and "anchor" in var and is_integer(var["stratum"]):
        anchor = var["anchor"]
        codes = anchor[:].astype(np.int64) if is_integer(anchor) else read_factor(anchor)[0]
        return res, labels, var["stratum"][:].astype(np.int64), codes
    if "res" in var:
        raise DataError(
            f"var has a column 'res' but no integer 'stratum' with 'anchor'; found columns {sorted(var)!r}; "
            "a file of several resolutions needs all three"
        )
    blocks = (_bytes(names[at : at + BLOCK]) for at in range(0, len(names), BLOCK))
    return res, labels, *parse_names(blocks)


def _bytes(block: NDArray[Any]) -> list[bytes]:
    return [v if isinstance(v, bytes) else str(v).encode() for v in block]


def _assemble(
    names: Any,
    res: NDArray[np.int64],
    labels: list[str | None],
    stratum: NDArray[np.int64],
    anchor: NDArray[np.int64],
) -> FeatureLayout:
    """Cut the features into strata and number the anchors."""
    strata: list[Stratum] = []
    anchor_names: list[str] = []
    row_of = np.empty(0, dtype=np.int64)
    for start, stop in _runs(res, stratum):
        k, label = int(stratum[start]), labels[int(res[start])]
        _check_order(strata, k, label)
        codes = anchor[start:stop]
        if k == 0:
            row_of = _number_anchors(codes, len(anchor_names))
            anchor_names += read_strings(names, start=start, stop=stop)
        rows = row_of[np.clip(codes, 0, len(row_of) - 1)]
        lost = np.flatnonzero((rows < 0) | (codes < 0) | (codes >= len(row_of)))
        if len(lost):
            name = read_strings(names, start=start + int(lost[0]), stop=start + int(lost[0]) + 1)[0]
            raise DataError(
                f"the feature {name!r} of stratum {k} has a bin that stratum 0 does not list; keep all bins"
            )
        strata.append(Stratum(k, label, start, stop, rows))
    return FeatureLayout(tuple(strata), np.array(anchor_names, dtype=np.str_))


def _runs(res: NDArray[np.int64], stratum: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the column ranges over which resolution and stratum stay the same."""
    ends = np.flatnonzero((np.diff(res) != 0) | (np.diff(stratum) != 0)) + 1
    edges = [0, *ends.tolist(), len(stratum)]
    return list(pairwise(edges))


def _check_order(strata: list[Stratum], k: int, label: str | None) -> None:
    """Refuse a stratum that does not follow on the ones before it."""
    where = "" if label is None else f" of resolution {label!r}"
    if any(s.k == k and s.resolution == label for s in strata):
        raise DataError(
            f"features are not in stratum-major order: stratum {k}{where} comes in more than one piece; sort "
            "var by resolution, stratum, anchor"
        )
    follows = bool(strata) and strata[-1].resolution == label
    expected = strata[-1].k + 1 if follows else 0
    if k != expected:
        raise DataError(
            f"expected stratum {expected}{where}, found stratum {k}; strata must be 0, 1, 2, ... without a "
            "gap, in stratum-major order"
        )


def _number_anchors(codes: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """Return the table code -> anchor row, -1 where stratum 0 has no such bin."""
    if len(np.unique(codes)) != len(codes) or codes.min() < 0:
        raise DataError("stratum 0 lists a bin twice or without a name; every bin must come exactly once")
    row_of = np.full(int(codes.max()) + 1, -1, dtype=np.int64)
    row_of[codes] = np.arange(first, first + len(codes))
    return row_of


def parse_names(blocks: Iterable[list[bytes]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stratum and the anchor code of every name, [feature] each, anchors numbered as stratum 0 lists them.

    Names come in blocks, so that never all of them are in memory.

    Raises:
        DataError: A name is no feature name, or its bin is not in stratum 0, or a bin comes twice.
    """
    anchors: dict[bytes, int] = {}
    strata, codes = [], []
    for block in blocks:
        for name in block:
            # A name that extends a known bin is looked up below; only bins themselves need the pattern.
            if name.rpartition(b"-")[0] not in anchors:
                _add_bin(name, anchors)
        parts = [name.rpartition(b"-") for name in block]
        code = np.array([anchors.get(base, -1) for base, _, _ in parts], dtype=np.int64)
        stratum = np.array([tail if c >= 0 else b"0" for (_, _, tail), c in zip(parts, code, strict=True)])
        first = np.flatnonzero(code < 0)
        code[first] = [anchors[block[i]] for i in first]
        strata.append(_to_integers(stratum, block))
        codes.append(code)
    return np.concatenate(strata), np.concatenate(codes)


def _add_bin(name: bytes, anchors: dict[bytes, int]) -> None:
    text = name.decode(errors="replace")
    if BIN.fullmatch(name) is None:
        raise DataError(
            f"feature name {text!r} does not parse, or its bin is not in stratum 0; expected 'chr1:0-500000' "
            "for a bin and 'chr1:0-500000-3' for its pair with the third bin after it, all bins first"
        )
    if name in anchors:
        raise DataError(f"the bin {text!r} comes twice in stratum 0; feature names must be unique")
    anchors[name] = len(anchors)


def _to_integers(tails: NDArray[np.bytes_], block: list[bytes]) -> NDArray[np.int64]:
    try:
        return tails.astype(np.int64)
    except ValueError:
        bad = next(n for n, tail in zip(block, tails, strict=True) if not tail.isdigit())
        raise DataError(
            f"feature name {bad.decode()!r} ends in no stratum; expected e.g. 'chr1:0-500000-3'"
        ) from None
