"""What `lightning-amp prepare` has kept and left out, read from the files that it wrote."""

from typing import Any

from lightning_amp.data.files.directory import DataDirectory
from lightning_amp.data.files.hdf5 import open_h5ad
from lightning_amp.planning.reports.plan_report import table

NAMED = 6
GENES = {
    "without_position": "without a position in the annotation",
    "on_chromosomes_left_out": "on chromosomes left out",
    "outside_bins": "with a promoter in no bin",
    "less_variable": "less variable",
}


def prepared_report(directory: DataDirectory) -> str:
    """Cells, genes and chromosomes: how many were read, are kept, and are left out for which reason."""
    from anndata.io import read_elem

    with open_h5ad(directory.modalities["hic"]) as file:
        hic, n_hic = read_elem(file["uns/amp"]), len(file["X/indptr"]) - 1
        n_chroms = len(file["var/chrom/categories"])
    with open_h5ad(directory.modalities["rna"]) as file:
        rna, (n_rna, n_genes) = read_elem(file["uns/amp"]), file["X"].attrs["shape"].tolist()
    n_far = int(hic["n_dropped_cells"] - hic["n_shallow_cells"])
    few = f"with fewer than {hic['min_depth']:,} contacts"
    left = list(hic["chromosomes_left_out"])
    rows = [
        _row("Hi-C cells", n_hic, {few: hic["n_shallow_cells"], "without contacts in the strata": n_far}),
        _row("RNA cells", n_rna, {"without counts in the genes kept": rna["n_dropped_cells"]}),
        _row("genes", n_genes, {words: rna["genes"][name] for name, words in GENES.items()}),
        ["chromosomes", str(n_chroms + len(left)), str(n_chroms), _names(left)],
    ]
    return table(["", "read", "kept", "left out"], rows)


def _row(what: str, kept: int, left_out: dict[str, Any]) -> list[str]:
    reasons = ", ".join(f"{int(n):,} {why}" for why, n in left_out.items() if n) or "none"
    return [what, f"{kept + int(sum(left_out.values())):,}", f"{kept:,}", reasons]


def _names(left_out: list[str]) -> str:
    if not left_out:
        return "none"
    more = f" and {len(left_out) - NAMED:,} more" if len(left_out) > NAMED else ""
    return f"{', '.join(left_out[:NAMED])}{more}; --chromosomes names those to keep"
