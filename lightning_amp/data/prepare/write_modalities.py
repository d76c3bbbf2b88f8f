"""Writes the modalities and the graph of a data directory, all named after one setting."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lightning_amp.data.files.graphml import write_graph
from lightning_amp.data.files.resolution import format_resolution
from lightning_amp.data.prepare.feature_grid import FeatureGrid
from lightning_amp.data.prepare.guidance_graph import build_graph
from lightning_amp.data.prepare.rna_counts import RnaCounts, write_rna
from lightning_amp.data.prepare.write_hic import write_hic
from lightning_amp.progress import track


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
        settings=settings,
        source=source,
    )
    vertices, edges = build_graph(positions, grid.bins, bulk, loop_quantile=loop_quantile)
    write_graph(root / "graphs" / f"{setting}.graphml.gz", vertices, edges)
