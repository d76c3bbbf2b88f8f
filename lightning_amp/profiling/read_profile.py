"""Read the profile of a data directory from headers and index columns, never the matrix (Zhang et al. 2026, 3.2)."""

import re
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_amp.data.files.directory import DataDirectory, find
from lightning_amp.data.files.graphml import count_graph
from lightning_amp.data.files.read_h5ad import ModalityHeader, read_header
from lightning_amp.data.files.strata_layout import FeatureLayout, read_layout
from lightning_amp.errors import DataError
from lightning_amp.profiling.profile import DecompositionProfile, GraphProfile, ModalityProfile, Profile

Attention = bool | Literal["full"]
PROBABILITY_MODELS = {"rna": "NB", "atac": "ZINB", "methyl": "ZILN", "hic": "HiCZINB"}
BIN_ENDS = re.compile(r":(\d+)-(\d+)\Z")
DENSE_RNA_MODEL = "Normal"
"""Probability model of RNA that is a dense matrix without a counts layer: scaled values, not counts."""


def profile(data_dir: str | Path, *, setting: str | None = None, attention: Attention | None = None) -> Profile:
    """Profile a data directory; h5ad files of unsupported modalities are only listed in `unread`.

    Args:
        data_dir: A directory written by `lightning-amp prepare`, or by HiGLUE's preprocessing.
        setting: Setting to read, if the directory has several.
        attention: Whether the Hi-C decoder builds its keys with attention, "full" if attention is to all anchors; None
            means local attention if there is more than one stratum, as in HiGLUE.

    Raises:
        DataError: The directory or one of its files cannot be read.
    """
    if attention not in (None, True, False, "full"):
        raise DataError(f"attention={attention!r} is not supported; allowed is True (local), 'full', False or None")
    directory = find(data_dir, setting=setting, others=True)
    found = {name: path for name in PROBABILITY_MODELS if (path := getattr(directory, name)) is not None}
    headers = {name: read_header(path) for name, path in sorted(found.items())}
    return Profile(
        data_dir=str(directory.root),
        modalities=tuple(_modality(name, headers, directory, attention) for name in headers),
        graph=_graph(directory),
        unread=tuple(str(path.relative_to(directory.root)) for path in directory.unread),
    )


def _modality(
    name: str, headers: dict[str, ModalityHeader], directory: DataDirectory, attention: Attention | None
) -> ModalityProfile:
    header = headers[name]
    scaled = name == "rna" and header.n_nonzero is None and not header.has_counts_layer
    others = [h.n_features for other, h in headers.items() if other != name]
    depth, spread = header.depth, None
    if depth is not None and np.all(np.isfinite(depth)) and depth.sum() > 0:
        spread = float(depth.std() / depth.mean())
    return ModalityProfile(
        name=name,
        file=str(header.path.relative_to(directory.root)),
        probability_model=DENSE_RNA_MODEL if scaled else PROBABILITY_MODELS[name],
        cells=header.n_cells,
        features=header.n_features,
        nonzero=header.n_nonzero,
        scale=header.n_features / max(others) if others else None,
        contact_spread=spread,
        decomposition=_decomposition(header, attention) if name == "hic" else None,
        batches=header.n_batches,
    )


def _decomposition(header: ModalityHeader, attention: Attention | None) -> DecompositionProfile:
    layout = read_layout(header.path)
    attends = layout.n_strata > 1 if attention is None else bool(attention)
    known_from = "taken from the number of strata, as in HiGLUE" if attention is None else "as given"
    return DecompositionProfile(
        anchors=layout.n_anchors,
        features=tuple(stratum.n_features for stratum in layout.strata),
        distances=tuple(stratum.k for stratum in layout.strata),
        attention=attends,
        full=attention == "full",
        known_from=known_from if attends else "",
        bin_bases=_bin_bases(layout),
    )


def _bin_bases(layout: FeatureLayout) -> int | None:
    """Return the width of most bins; the last bin of a chromosome is narrower."""
    if len({stratum.resolution for stratum in layout.strata}) > 1:
        return None
    ends = (BIN_ENDS.search(str(name)) for name in layout.anchor_names)
    widths = Counter(int(found[2]) - int(found[1]) for found in ends if found)
    width, times = widths.most_common(1)[0] if widths else (0, 0)
    return width if width > 0 and 2 * times > layout.n_anchors else None


def _graph(directory: DataDirectory) -> GraphProfile | None:
    if directory.graph is None:
        return None
    vertices, edges = count_graph(directory.graph)
    return GraphProfile(file=str(directory.graph.relative_to(directory.root)), vertices=vertices, edges=edges)
