"""`lightning-amp prepare`: write a data directory, and print the numbers of kept and dropped cells and features."""

import argparse
from typing import Any

from lightning_amp.planning.reports.table import table

NAMED = 6
GENES = {
    "without_position": "without a position in the annotation",
    "on_chromosomes_left_out": "on chromosomes left out",
    "outside_bins": "with a promoter in no bin",
    "less_variable": "less variable",
    "not_in_earlier": "not among the features of --like",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--hic", required=True, help="single-cell Hi-C, .scool")
    parser.add_argument("--rna", required=True, help="RNA, .h5ad with raw counts in X or layers['counts']")
    parser.add_argument("--genes", help="gene positions, GTF or BED, plain or .gz")
    parser.add_argument("--strata", type=int, help="bin distances to keep: 0 to STRATA - 1")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--like",
        metavar="OLD",
        help="take bins, strata and genes of an earlier folder, in place of --genes and --strata: for new cells of"
        " a model that was trained on it",
    )
    parser.add_argument("--labels", help="table of Hi-C cells (TSV): cell, celltype, batch, depth")
    parser.add_argument("--resolution", help="check: the bin size that the file must have, such as 500kb")
    parser.add_argument("--min-depth", type=int, default=0, help="drop cells with fewer contacts (default: 0)")
    parser.add_argument("--n-genes", type=int, default=2000, help="most variable genes to keep (default: 2000)")
    parser.add_argument(
        "--trans", dest="cis_only", action="store_false", help="also keep pairs of bins on two chromosomes"
    )
    parser.add_argument(
        "--chromosomes",
        help="chromosomes to keep, separated by commas (default: all but scaffolds and the mitochondrial one)",
    )
    parser.add_argument("--loop-quantile", type=float, default=0.98, help="pseudobulk quantile of graph edges")
    parser.add_argument(
        "--by-columns", action="store_true", help="store counts by columns, for ranks that read their own"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from anndata.io import read_elem

    from lightning_amp.data.files.read_h5ad import open_h5ad
    from lightning_amp.data.prepare.prepare import CELLTYPES, prepare

    chromosomes = arguments.chromosomes.split(",") if arguments.chromosomes else None
    options = {name: value for name, value in vars(arguments).items() if name != "run"}
    directory = prepare(**options | {"chromosomes": chromosomes})
    with open_h5ad(directory.modalities["hic"]) as file:
        hic, n_hic = read_elem(file["uns/amp"]), int(file["X"].attrs["shape"][0])
        n_chroms = len(file["var/chrom/categories"])
        celltypes = set(read_elem(file["obs/celltype"]))
    with open_h5ad(directory.modalities["rna"]) as file:
        rna, (n_rna, n_genes) = read_elem(file["uns/amp"]), file["X"].attrs["shape"].tolist()
    n_far = int(hic["n_dropped_cells"] - hic["n_shallow_cells"])
    few = f"with fewer than {hic['min_depth']:,} contacts"
    left = list(hic["chromosomes_left_out"])
    more = f" and {len(left) - NAMED:,} more" if len(left) > NAMED else ""
    named = f"{', '.join(left[:NAMED])}{more}; --chromosomes names those to keep" if left else "none"
    # numbers read, kept, and dropped by reason
    rows = [
        _row("Hi-C cells", n_hic, {few: hic["n_shallow_cells"], "without contacts in the strata": n_far}),
        _row("RNA cells", n_rna, {"without counts in the genes kept": rna["n_dropped_cells"]}),
        _row("genes", n_genes, {words: rna["genes"].get(name, 0) for name, words in GENES.items()}),
        ["chromosomes", str(n_chroms + len(left)), str(n_chroms), named],
    ]
    text = table(["", "read", "kept", "left out"], rows)
    if filled := int(rna["genes"].get("filled_with_zeros", 0)):
        text += f"\n{filled:,} of the genes of --like are not in --rna; they have no counts in any cell"
    if celltypes == {"Unknown"}:
        # columns of other names are copied, but not used as the cell type
        names = f"{', '.join(CELLTYPES[:-1])} or {CELLTYPES[-1]}"
        text += f"\nno cell has a type: --labels has it in a column {names}"
    print(f"{text}\n")
    for path in (directory.hic, directory.rna, directory.graph):
        print(f"wrote {path}")


def _row(what: str, kept: int, left_out: dict[str, Any]) -> list[str]:
    reasons = ", ".join(f"{int(n):,} {why}" for why, n in left_out.items() if n) or "none"
    return [what, f"{kept + int(sum(left_out.values())):,}", f"{kept:,}", reasons]
