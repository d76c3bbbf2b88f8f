"""Describe what `prepare` has read, kept and left out, as a table for the command line and for Python."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from lightning_amp.data.files.directory import DataDirectory
from lightning_amp.data.files.pairs import is_paired, matched_rows
from lightning_amp.data.files.read_h5ad import names_of, open_h5ad, read_strings
from lightning_amp.text_table import table

CELLTYPES = ("celltype", "cell_type", "cluster")
"""Columns of the table of labels that may hold the types of cells."""
NAMED = 6
GENES = {
    "without_position": "without a position in the annotation",
    "on_chromosomes_left_out": "on chromosomes left out",
    "outside_bins": "with a promoter in no bin",
    "less_variable": "less variable",
    "not_in_earlier": "not among the features of --like",
}


@dataclass(frozen=True, slots=True, repr=False)
class PreparedDirectory(DataDirectory):
    """A data directory that `prepare` has written; printed, it shows what was kept and what was left out."""

    rows: tuple[tuple[str, int, int, str], ...] = ()
    """What, how many were read, how many are kept, and why the others were left out."""
    notes: tuple[str, ...] = ()
    """What else is worth knowing, such as that no cell has a type."""

    @property
    def table(self) -> pd.DataFrame:
        """Numbers that were read and kept, and why others were left out, by what they count."""
        return pd.DataFrame([row[1:] for row in self.rows], [row[0] for row in self.rows], ["read", "kept", "left out"])

    def __str__(self) -> str:
        """Return the table, the notes, and the files."""
        rows = [[what, f"{read:,}", f"{kept:,}", why] for what, read, kept, why in self.rows]
        files = [f"wrote {path}" for path in (self.hic, self.rna, self.graph)]
        return "\n".join([table(["", "read", "kept", "left out"], rows), *self.notes, "", *files])

    __repr__ = __str__


def describe(directory: DataDirectory) -> PreparedDirectory:
    """Read from a directory what `prepare` has noted in it."""
    from anndata.io import read_elem

    with open_h5ad(directory.modalities["hic"]) as file:
        hic, n_hic = read_elem(file["uns/amp"]), int(file["X"].attrs["shape"][0])
        n_chroms = len(file["var/chrom/categories"])
        celltypes, hic_cells = set(read_elem(file["obs/celltype"])), read_strings(names_of(file["obs"]))
    with open_h5ad(directory.modalities["rna"]) as file:
        rna, (n_rna, n_genes) = read_elem(file["uns/amp"]), file["X"].attrs["shape"].tolist()
        rna_cells = read_strings(names_of(file["obs"]))
    n_far = int(hic["n_dropped_cells"] - hic["n_shallow_cells"])
    few = f"with fewer than {hic['min_depth']:,} contacts"
    left = list(hic["chromosomes_left_out"])
    more = f" and {len(left) - NAMED:,} more" if len(left) > NAMED else ""
    named = f"{', '.join(left[:NAMED])}{more}; --chromosomes names those to keep" if left else "none"
    # numbers read, kept, and dropped by reason
    rows = (
        _row("Hi-C cells", n_hic, {few: hic["n_shallow_cells"], "without contacts in the strata": n_far}),
        _row("RNA cells", n_rna, {"without counts in the genes kept": rna["n_dropped_cells"]}),
        _row("genes", n_genes, {words: rna["genes"].get(name, 0) for name, words in GENES.items()}),
        ("chromosomes", n_chroms + len(left), n_chroms, named),
    )
    notes = []
    if filled := int(rna["genes"].get("filled_with_zeros", 0)):
        notes.append(f"{filled:,} of the genes of --like are not in --rna; they have no counts in any cell")
    if is_paired(directory.modalities):
        n = len(matched_rows({"hic": np.array(hic_cells), "rna": np.array(rna_cells)})["hic"])
        alone = f"; {n_hic - n:,} Hi-C and {n_rna - n:,} RNA cells are without the other half, and not trained on"
        notes.append(f"{n:,} cells are paired{alone if n < max(n_hic, n_rna) else ''}")
    if celltypes == {"Unknown"}:
        # columns of other names are copied, but not used as the cell type
        names = f"{', '.join(CELLTYPES[:-1])} or {CELLTYPES[-1]}"
        notes.append(f"no cell has a type: --labels has it in a column {names}")
    plain = {field.name: getattr(directory, field.name) for field in fields(DataDirectory)}
    return PreparedDirectory(**plain, rows=rows, notes=tuple(notes))


def _row(what: str, kept: int, left_out: dict[str, Any]) -> tuple[str, int, int, str]:
    reasons = ", ".join(f"{int(n):,} {why}" for why, n in left_out.items() if n) or "none"
    return what, kept + int(sum(left_out.values())), kept, reasons
