"""Reads the table of cell labels that goes with a .scool (the "reference" TSV of SCORE)."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lightning_amp.data.files.open_text import open_stream
from lightning_amp.data.files.resolution import strip_resolution
from lightning_amp.errors import DataError

CELLTYPES = ("celltype", "cell_type", "cluster")


def read_labels(path: str | Path, *, resolution: int) -> pd.DataFrame:
    """Read a table (TSV with a header) of `cell`, and optionally `depth`, `batch`, and `celltype`, `cell_type` or
    `cluster`.

    Suffixes of cell names that name the resolution, in base pairs, are removed. Returns, indexed by cell, celltype
    (str, "Unknown" where absent), batch (str, "0" where absent) and read_depth (float64, 1 where absent), then all
    other columns of the table as text.

    Raises:
        DataError: The file cannot be read, has no column `cell`, repeats a cell or has a depth that is no
            number.
    """
    path = Path(path)
    with open_stream(path, what="table of cell labels") as stream:
        try:
            table = pd.read_csv(stream, sep="\t", dtype=str, encoding_errors="replace")
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            raise DataError(f"{path}: the labels are no tab-separated table ({error})") from error
    if "cell" not in table:
        raise DataError(
            f"{path}: no column 'cell', found {list(table)!r}; tab-separated with a header is needed"
        )
    names = table["cell"].fillna("")
    cells = pd.Index([strip_resolution(name, resolution=resolution) for name in names], name="cell")
    if cells.has_duplicates:
        again = cells[cells.duplicated()].unique().tolist()
        raise DataError(
            f"{path}: cells are listed more than once: {again[:3]!r} ({len(again)} cells); keep one line each"
        )
    celltype = _column(table, CELLTYPES, "Unknown")
    depth = pd.to_numeric(_column(table, ["depth"], "1"), errors="coerce")
    if depth.isna().any() or (depth < 0).any():
        line = int((depth.isna() | (depth < 0)).to_numpy().argmax())
        raise DataError(
            f"{path}: depth {table['depth'].iloc[line]!r} of cell {cells[line]!r} is no non-negative number; "
            "correct it"
        )
    known = {
        "celltype": celltype.to_numpy(),
        "batch": _column(table, ["batch"], "0").to_numpy(),
        "read_depth": depth.to_numpy("float64"),
    }
    others = table.drop(columns=["cell", *{*CELLTYPES, "depth", *known} & set(table)]).fillna("n/a")
    return pd.DataFrame(known, index=cells).join(others.set_axis(cells))


def label_cells(labels: pd.DataFrame | None, cells: list[str], *, path: str | Path | None) -> pd.DataFrame:
    """Return the labels of the cells in their order; without a table, the defaults of `read_labels`.

    Raises:
        DataError: The table, of the file `path`, lacks some of the cells.
    """
    if labels is None:
        return pd.DataFrame(
            {"celltype": "Unknown", "batch": "0", "read_depth": 1.0}, index=pd.Index(cells, name="cell")
        )
    missing = [cell for cell in cells if cell not in labels.index]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(cells)} cells have no label, e.g. {missing[:3]!r}; the table "
            f"has e.g. {labels.index[:3].tolist()!r}; add them (the cell type may be empty) or correct the names"
        )
    return labels.loc[cells]


def _column(table: pd.DataFrame, names: Sequence[str], default: str) -> pd.Series:
    """Return the first of the columns that exists, with empty fields filled by the default."""
    found = next((name for name in names if name in table), None)
    return pd.Series(default, index=table.index) if found is None else table[found].fillna(default)
