"""Define the profile of a data directory: sizes of its files, which can be printed, stored as JSON and compared.

Legend: cells, features, anchors, strata, vertices and edges are counts; sizes in bytes end in `_bytes`.
"""

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecompositionProfile:
    """Decomposition of a modality's decoder: for Hi-C, one unit per stratum.

    Attributes:
        anchors: Vertices that the keys are built for, N.
        features: Features of every stratum, F_k, in column order.
        distances: The bin distance k of every stratum; 0 means contacts of a bin with itself.
        attention: Whether the decoder builds its keys with attention.
        full: Whether attention is to all anchors (else to neighbouring buckets).
        window: Anchors in a bucket of local attention, which covers three buckets; None if unknown.
        known_from: Source of the attention range, "" without attention.
        bin_bases: Base pairs of an anchor, None if they are unknown or differ.
    """

    anchors: int
    features: tuple[int, ...]
    distances: tuple[int, ...]
    attention: bool
    full: bool = False
    window: int | None = None
    known_from: str = ""
    bin_bases: int | None = None

    @property
    def strata(self) -> int:
        """Number of strata, K."""
        return len(self.features)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModalityProfile:
    """Sizes of one modality's file.

    Attributes:
        name: "rna", "hic", "atac" or "methyl".
        file: File name inside the data directory.
        probability_model: "NB", "ZINB", "HiCZINB", "ZILN" or "Normal".
        cells: Cells in the file.
        features: Features in the file.
        nonzero: Stored nonzero values, None if the matrix is dense.
        scale: Features relative to the largest other modality, None if it is the only one.
        contact_spread: Standard deviation over mean of the counts per cell, None if the file does not store them.
        decomposition: Strata of a Hi-C modality, None for others.
        batches: Experimental batches.
    """

    name: str
    file: str
    probability_model: str
    cells: int
    features: int
    nonzero: int | None
    scale: float | None
    contact_spread: float | None
    decomposition: DecompositionProfile | None = None
    batches: int = 1

    @property
    def zeros(self) -> float | None:
        """Share of zeros in the matrix, None if the matrix is dense."""
        if self.nonzero is None:
            return None
        return 1.0 - self.nonzero / max(1, self.cells * self.features)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphProfile:
    """The guidance graph: its vertices (genes and bins) and edges, self-loops included."""

    file: str
    vertices: int
    edges: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Profile of a data directory: modalities in alphabetical order, and the guidance graph.

    `unread` lists h5ad files of unsupported modalities, by their path inside `data_dir`. Their sizes are unknown; a
    signal of `register_signal` may read the files.
    """

    data_dir: str
    modalities: tuple[ModalityProfile, ...]
    graph: GraphProfile | None
    unread: tuple[str, ...] = ()
    schema: int = SCHEMA

    def modality(self, name: str) -> ModalityProfile | None:
        """Return the modality with this name, None if the data directory has none."""
        return next((m for m in self.modalities if m.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON, including the share of zeros and the number of strata."""
        plain = asdict(self)
        for modality, row in zip(self.modalities, plain["modalities"], strict=True):
            row["zeros"] = modality.zeros
            if modality.decomposition is not None:
                row["decomposition"]["strata"] = modality.decomposition.strata
        return plain
