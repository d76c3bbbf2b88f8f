"""Prepare a data directory from single-cell contacts (.scool), RNA counts (.h5ad), gene positions and cell labels."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from lightning_amp.data.files.directory import find, write_aside
from lightning_amp.data.files.graphml import write_graph
from lightning_amp.data.files.new_hdf5 import UNKNOWN_ASSEMBLY
from lightning_amp.data.files.pairs import check_pairs
from lightning_amp.data.files.read_h5ad import first_column, open_stream, store_by_columns
from lightning_amp.data.prepare import read_scool
from lightning_amp.data.prepare.earlier_features import read_earlier_features
from lightning_amp.data.prepare.gene_positions import build_graph, read_genes
from lightning_amp.data.prepare.hic_modality import FeatureGrid, build_grid, write_hic
from lightning_amp.data.prepare.prepared import CELLTYPES, PreparedDirectory, describe
from lightning_amp.data.prepare.rna_modality import RnaCounts, check_same_positions, choose_genes, read_rna, write_rna
from lightning_amp.errors import DataError
from lightning_amp.progress import track


def read_labels(path: str | Path, *, resolution: int) -> pd.DataFrame:
    """Read a table (TSV with a header) of `cell`, and optionally `depth`, `batch`, and `celltype`, `cell_type` or
    `cluster`.

    Suffixes of cell names that name the resolution, in base pairs, are removed. Returns, indexed by cell, celltype
    (str, "Unknown" where absent), batch (str, "0" where absent) and read_depth (float64, 1 where absent), then all
    other columns of the table as text.
    """
    path = Path(path)
    with open_stream(path, what="table of cell labels") as stream:
        try:
            table = pd.read_csv(stream, sep="\t", dtype=str, encoding_errors="replace")
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            raise DataError(f"{path}: the labels are no tab-separated table ({error})") from error
    if "cell" not in table:
        raise DataError(f"{path}: no column 'cell', found {list(table)!r}; tab-separated with a header is needed")
    names = table["cell"].fillna("")
    cells = pd.Index([read_scool.strip_resolution(name, resolution=resolution) for name in names], name="cell")
    if cells.has_duplicates:
        again = cells[cells.duplicated()].unique().tolist()
        raise DataError(
            f"{path}: cells are listed more than once: {again[:3]!r} ({len(again)} cells); keep one line each"
        )
    celltype = first_column(table, CELLTYPES, "Unknown")
    depth = pd.to_numeric(first_column(table, ["depth"], "1"), errors="coerce")
    if depth.isna().any() or (depth < 0).any():
        line = int((depth.isna() | (depth < 0)).to_numpy().argmax())
        raise DataError(
            f"{path}: depth {table['depth'].iloc[line]!r} of cell {cells[line]!r} is no number of 0 or more; correct it"
        )
    known = {
        "celltype": celltype.to_numpy(),
        "batch": first_column(table, ["batch"], "0").to_numpy(),
        "read_depth": depth.to_numpy("float64"),
    }
    others = table.drop(columns=["cell", *{*CELLTYPES, "depth", *known} & set(table)]).fillna("n/a")
    return pd.DataFrame(known, index=cells).join(others.set_axis(cells))


def prepare(
    *,
    hic: str | Path,
    rna: str | Path,
    genes: str | Path | None = None,
    strata: int | None = None,
    out: str | Path,
    like: str | Path | None = None,
    labels: str | Path | None = None,
    resolution: int | str | None = None,
    min_depth: int = 0,
    n_genes: int = 2000,
    cis_only: bool = True,
    chromosomes: Sequence[str] | None = None,
    loop_quantile: float = 0.98,
    by_columns: bool = False,
    paired: bool = False,
    overwrite: bool = False,
) -> PreparedDirectory:
    """Prepare a data directory; Hi-C cells are streamed, so memory grows with the genome and the RNA alone.

    Args:
        hic: The .scool.
        rna: h5ad with raw RNA counts; its cells need not be those of the .scool.
        genes: GTF or BED with the genes' positions on the same assembly; not with `like`.
        strata: Number of strata, i.e. contacts between bins less than `strata` bins apart are kept; not with `like`.
        out: Directory to write.
        like: An earlier data directory, whose bins, strata and genes are taken, so that a model that was trained on it
            can read the new cells; genes that the new file lacks have no counts.
        labels: TSV with a line for each of the .scool's cells, of the columns that `read_labels` names.
        resolution: Bin width that the .scool is expected to have; only checked.
        min_depth: Least number of contacts of a cell on the kept chromosomes.
        n_genes: Number of most variable genes to keep.
        cis_only: Keep pairs on one chromosome only.
        chromosomes: Chromosomes to keep, with or without "chr"; by default all but scaffolds and the mitochondrial
            one.
        loop_quantile: Quantile above which summed contacts become edges of the graph.
        by_columns: Store counts as CSC, so that ranks that split the features read their own columns alone; the
            contacts are read once more for every 64 million of them.
        paired: The cells of the two files are the same ones, by name (barcode); training then uses the pairs.
        overwrite: Replace an existing data directory.

    Returns:
        The files. Printed, it shows how many cells, genes and chromosomes were read and kept, and why the others were
        left out; `.table` has the same as a DataFrame.

    Raises:
        DataError: Any of the files cannot be used; nothing is then left behind.
    """
    earlier = None if like is None else read_earlier_features(like)
    if earlier is not None:
        for name, value in (("genes", genes), ("strata", strata), ("chromosomes", chromosomes)):
            if value is not None:
                raise DataError(f"{name}={value!r} and like={str(like)!r} exclude each other; leave one out")
        strata, cis_only, chromosomes = earlier.strata, earlier.cis_only, earlier.chromosomes
    if strata is None or (genes is None and earlier is None):
        name = "strata" if strata is None else "genes"
        raise DataError(f"{name} is missing; give it, or like=, an earlier directory that has the features")
    for name, value, least in (("strata", strata, 1), ("min_depth", min_depth, 0), ("n_genes", n_genes, 1)):
        if value < least:
            raise DataError(f"{name}={value!r} is too small; at least {least} is allowed")
    if not 0 <= loop_quantile < 1:
        raise DataError(f"loop_quantile={loop_quantile!r} is out of range; allowed is 0 <= loop_quantile < 1")
    with write_aside(out, overwrite=overwrite, needed=partial(_bytes_needed, hic, rna)) as aside:
        scool = read_scool.ScoolFile(Path(hic))
        width = scool.resolution()
        if resolution is not None and read_scool.parse_resolution(resolution) != width:
            raise DataError(
                f"{scool.path}: resolution={resolution!r} was given, found bins of {width!r} bp "
                f"({read_scool.format_resolution(width)!r}); give the file of that resolution, or this resolution"
            )
        present = scool.bins["chrom"].drop_duplicates().tolist()
        kept = read_scool.choose_chromosomes(chromosomes, present, path=scool.path)
        grid = build_grid(scool.bins, strata=strata, chromosomes=kept, cis_only=cis_only, source=scool.path)
        named = scool.named_cells()
        if labels is None:
            unknown = {"celltype": "Unknown", "batch": "0", "read_depth": 1.0}
            marks = pd.DataFrame(unknown, index=pd.Index(list(named), name="cell"))
        else:
            table = read_labels(labels, resolution=width)
            if missing := [cell for cell in named if cell not in table.index]:
                raise DataError(
                    f"{labels}: {len(missing)} of {len(named)} cells have no label, e.g. {missing[:3]!r}; the table has"
                    f" e.g. {table.index[:3].tolist()!r}; add them (the cell type may be empty) or correct the names"
                )
            marks = table.loc[list(named)]
        read = read_rna(rna)
        if paired:
            check_pairs({str(hic): list(named), str(rna): read.obs.index.astype(str).tolist()})
        if earlier is not None:
            earlier.check_bins(grid, scool.path)
            if read.positions is not None:
                check_same_positions(read.positions, earlier.genes, source=read.source, annotation=earlier.root)
            counts, positions = earlier.take(read)
        else:
            assert genes is not None, "checked above"
            counts, positions = choose_genes(read, read_genes(genes), grid.bins, n_genes=n_genes, annotation=genes)
        # lazily: a cell is read when it is written
        pixels = scool.iterate(named.values())
        write_modalities(
            aside,
            grid=grid,
            cells=((name, table) for name, (_, table) in zip(named, pixels, strict=True)),
            labels=marks,
            rna=counts,
            positions=positions,
            loop_quantile=loop_quantile,
            min_depth=min_depth,
            source=scool.path,
            assembly=scool.assembly,
            paired=paired,
        )
        if by_columns:
            for path in find(aside).modalities.values():
                store_by_columns(path)
    return describe(find(Path(out)))


ENTRY_BYTES = 8
"""Of a count and its column, before compression."""


def _bytes_needed(hic: str | Path, rna: str | Path) -> int:
    """Return about how many bytes `prepare` writes at most: the contacts, and RNA counts twice, before compression."""
    return ENTRY_BYTES * read_scool.ScoolFile(Path(hic)).n_pixels() + 2 * Path(rna).stat().st_size


def write_modalities(
    root: Path,
    *,
    grid: FeatureGrid,
    cells: Iterable[tuple[str, pd.DataFrame]],
    labels: pd.DataFrame,
    rna: RnaCounts,
    positions: pd.DataFrame,
    loop_quantile: float,
    min_depth: int,
    source: str | Path,
    assembly: str = UNKNOWN_ASSEMBLY,
    paired: bool = False,
) -> None:
    """Write hic/, rna/ and graphs/ under an existing directory; arguments as for `write_hic`, `write_rna`,
    `build_graph`.
    """
    width = int((grid.bins["end"] - grid.bins["start"]).max())
    setting = f"{read_scool.format_resolution(width)}_raw_{loop_quantile:g}_2d_{grid.n_strata}"
    settings = {"setting": setting, "resolution": width, "strata": grid.n_strata, "cis_only": grid.cis_only}
    settings["paired"] = paired
    for name in ("hic", "rna", "graphs"):
        (root / name).mkdir()
    write_rna(root / "rna" / f"rna_{setting}.h5ad", rna, positions, settings=settings)
    bulk = write_hic(
        root / "hic" / f"hic_{setting}.h5ad",
        track(cells, description="Contacts", total=len(labels)),
        grid=grid,
        labels=labels,
        min_depth=min_depth,
        settings=settings | {"genome_assembly": assembly},
        source=source,
    )
    vertices, edges = build_graph(positions, grid.bins, bulk, loop_quantile=loop_quantile)
    write_graph(root / "graphs" / f"{setting}.graphml.gz", vertices, edges)
