"""Prepares a data directory from single-cell contacts (.scool), RNA counts (.h5ad) and gene positions."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from lightning_amp.data.files.chromosome_names import choose_chromosomes
from lightning_amp.data.files.directory import DataDirectory, find
from lightning_amp.data.files.graphml import write_graph
from lightning_amp.data.files.read_columns import store_by_columns
from lightning_amp.data.files.resolution import format_resolution, parse_resolution
from lightning_amp.data.files.write_aside import write_aside
from lightning_amp.data.files.write_cooler import UNKNOWN_ASSEMBLY
from lightning_amp.data.prepare.cell_labels import label_cells, read_labels
from lightning_amp.data.prepare.feature_grid import FeatureGrid, build_grid
from lightning_amp.data.prepare.gene_positions import read_genes
from lightning_amp.data.prepare.guidance_graph import build_graph
from lightning_amp.data.prepare.read_scool import ScoolFile
from lightning_amp.data.prepare.rna_counts import RnaCounts, read_rna, write_rna
from lightning_amp.data.prepare.variable_genes import choose_genes
from lightning_amp.data.prepare.write_hic import write_hic
from lightning_amp.errors import DataError
from lightning_amp.progress import track


def prepare(
    *,
    hic: str | Path,
    rna: str | Path,
    genes: str | Path,
    strata: int,
    out: str | Path,
    labels: str | Path | None = None,
    resolution: int | str | None = None,
    min_depth: int = 0,
    n_genes: int = 2000,
    cis_only: bool = True,
    chromosomes: Sequence[str] | None = None,
    loop_quantile: float = 0.98,
    by_columns: bool = False,
    overwrite: bool = False,
) -> DataDirectory:
    """Prepare a data directory; Hi-C cells are streamed, so memory grows with the genome and the RNA alone.

    Args:
        hic: The .scool.
        rna: h5ad with raw RNA counts; its cells need not be those of the .scool.
        genes: GTF or BED with the genes' positions on the same assembly.
        strata: Number of strata, i.e. contacts of bins less than `strata` apart are kept.
        out: Directory to write.
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
        overwrite: Replace an existing data directory.

    Raises:
        DataError: Any of the files cannot be used; nothing is then left behind.
    """
    _check_numbers(strata=strata, min_depth=min_depth, n_genes=n_genes, loop_quantile=loop_quantile)
    with write_aside(out, overwrite=overwrite) as aside:
        scool = ScoolFile(Path(hic))
        width = scool.resolution()
        if resolution is not None and parse_resolution(resolution) != width:
            raise DataError(
                f"{scool.path}: resolution={resolution!r} was given, found bins of {width!r} bp "
                f"({format_resolution(width)!r}); give the file of that resolution, or this resolution"
            )
        present = scool.bins["chrom"].drop_duplicates().tolist()
        kept = choose_chromosomes(chromosomes, present, path=scool.path)
        grid = build_grid(scool.bins, strata=strata, chromosomes=kept, cis_only=cis_only, source=scool.path)
        named = scool.named_cells()
        table = None if labels is None else read_labels(labels, resolution=width)
        marks = label_cells(table, list(named), path=labels)
        found = read_rna(rna), read_genes(genes)
        counts, positions = choose_genes(*found, grid.bins, n_genes=n_genes, annotation=genes)
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
        )
        if by_columns:
            for path in find(aside).modalities.values():
                store_by_columns(path)
    return find(Path(out))


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
) -> None:
    """Write hic/, rna/ and graphs/ under an existing directory; arguments as for `write_hic`, `write_rna`,
    `build_graph`.

    Raises:
        DataError: No cell of a modality is left.
    """
    width = int((grid.bins["end"] - grid.bins["start"]).max())
    setting = f"{format_resolution(width)}_raw_{loop_quantile:g}_2d_{grid.n_strata}"
    settings = {"setting": setting, "resolution": width, "strata": grid.n_strata, "cis_only": grid.cis_only}
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


def _check_numbers(*, strata: int, min_depth: int, n_genes: int, loop_quantile: float) -> None:
    for name, value, least in (("strata", strata, 1), ("min_depth", min_depth, 0), ("n_genes", n_genes, 1)):
        if value < least:
            raise DataError(f"{name}={value!r} is too small; at least {least} is allowed")
    if not 0 <= loop_quantile < 1:
        raise DataError(f"loop_quantile={loop_quantile!r} is out of range; allowed is 0 <= loop_quantile < 1")
