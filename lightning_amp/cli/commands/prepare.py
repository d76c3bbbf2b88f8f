"""`lightning-amp prepare`: write a data directory, and print the numbers of kept and dropped cells and features."""

import argparse


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
    parser.add_argument(
        "--paired",
        action="store_true",
        help="the cells of the two files are the same ones, by their names (barcodes): training uses the pairs",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from lightning_amp.data.prepare.prepare import prepare

    chromosomes = arguments.chromosomes.split(",") if arguments.chromosomes else None
    options = {name: value for name, value in vars(arguments).items() if name != "run"}
    print(prepare(**options | {"chromosomes": chromosomes}))
