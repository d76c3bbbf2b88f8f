"""Define the sizes, strata and guidance graph that the reference model needs to build its networks.

Kept in checkpoints as plain tensors, numbers and lists, so that a checkpoint can be loaded without the data.
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_amp._torch import tree_map
from lightning_amp.errors import ModelError

if TYPE_CHECKING:
    from lightning_amp.data.files.strata_layout import FeatureLayout
    from lightning_amp.data.loading.datamodule import SingleCellDataModule

HIC = "hic"
CHECKPOINT_KEY = "model_inputs"
TOTALS: dict[str, float | None] = {HIC: 5e4, "rna": 1e4, "atac": 1e4, "methyl": None}
"""Counts per cell to which the encoder scales, for each supported modality; None: not counts."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModalityInputs:
    """Sizes of one modality."""

    n_features: int
    n_batches: int
    vertices: NDArray[np.int64]  # row in the graph of each feature (Hi-C: of each anchor), int64
    # names of the features (Hi-C: of the anchors) and of the experimental batches; None if they are not known
    features: list[str] | None = None
    batches: list[str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrataInputs:
    """Strata of the Hi-C modality, in the order of its columns."""

    n_anchors: int
    # for each stratum, the anchor of each of its features, int64; the name is part of the checkpoint format
    nodes: list[NDArray[np.int64]]
    distances: list[int]  # for each stratum, its distance k in anchors
    # for each stratum, its share of the contacts of the training cells; None if they are not known
    shares: list[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GraphInputs:
    """Guidance graph."""

    n_vertices: int
    source: NDArray[np.int64]  # one end of each edge, int64
    target: NDArray[np.int64]  # the other end, int64
    weight: NDArray[np.float32]  # in (0, 1], float32
    sign: NDArray[np.float32]  # +1 or -1, float32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelInputs:
    """Inputs of the reference model; the order of the modalities is the order of the discriminator's classes."""

    modalities: dict[str, ModalityInputs]
    strata: StrataInputs | None
    graph: GraphInputs
    paired: bool = False  # whether the cells of all modalities in a training batch are the same ones, in one order

    def __post_init__(self) -> None:
        unknown = sorted(set(self.modalities) - set(TOTALS))
        if unknown or not self.modalities:
            raise ModelError(
                f"GLUE got the modalities {list(self.modalities)!r}; it has decoders for {list(TOTALS)!r}, choose at"
                " least one of these"
            )
        if (HIC in self.modalities) != (self.strata is not None):
            raise ModelError(
                f"GLUE got the modalities {list(self.modalities)!r} and strata={self.strata!r}; "
                f"{HIC!r} and its strata must be given together"
            )

    def to_plain(self) -> dict[str, Any]:
        """Convert to nested dicts and lists of tensors and numbers, for a checkpoint."""
        plain: dict[str, Any] = tree_map(
            lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, asdict(self)
        )
        return plain

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], model: str) -> "ModelInputs":
        """Return the inputs in a checkpoint; `model` is the name of the model, for messages."""
        if CHECKPOINT_KEY not in checkpoint:
            raise ModelError(
                f"the checkpoint has no {CHECKPOINT_KEY!r}, only {sorted(checkpoint)!r}; load one that {model} wrote"
            )
        return cls.from_plain(checkpoint[CHECKPOINT_KEY])

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "ModelInputs":
        """Invert `to_plain`."""
        state = tree_map(lambda x: x.cpu().numpy() if isinstance(x, torch.Tensor) else x, plain)
        return cls(
            modalities={name: ModalityInputs(**fields) for name, fields in state["modalities"].items()},
            strata=None if state["strata"] is None else StrataInputs(**state["strata"]),
            graph=GraphInputs(**state["graph"]),
            paired=state.get("paired", False),
        )

    def difference(self, other: "ModelInputs") -> str | None:
        """Return the dotted name of the first field that differs, None if all are equal; unknown names are equal."""
        a, b = asdict(self), asdict(other)
        for one, two in ((a["modalities"][name], b["modalities"].get(name, {})) for name in a["modalities"]):
            for field in ("features", "batches"):
                if one[field] is None or two.get(field) is None:
                    one[field] = two[field] = None
        for strata in (a["strata"], b["strata"]):
            if strata is not None:
                # a value, not a size: other cells may be held out
                strata["shares"] = None
        return difference(a, b)


def strata_from(layout: "FeatureLayout") -> StrataInputs:
    """Return the strata of a layout of Hi-C features."""
    return StrataInputs(
        n_anchors=layout.n_anchors,
        nodes=[np.array(stratum.anchors, dtype=np.int64) for stratum in layout.strata],
        distances=[int(stratum.k) for stratum in layout.strata],
    )


def inputs_from(datamodule: "SingleCellDataModule") -> ModelInputs:
    """Read the inputs from a data module after its setup.

    A single modality does not require a graph: each anchor or feature is then joined to itself only.
    """
    absent = [name for name in ("tables", "layout", "graph", "vertices") if not hasattr(datamodule, name)]
    if absent:
        raise ModelError(
            f"the data module {type(datamodule).__name__} has no {absent!r}; use SingleCellDataModule, or call "
            "build(inputs) before the trainer starts"
        )
    layout, graph = datamodule.layout, datamodule.graph
    strata = None if layout is None else replace(strata_from(layout), shares=_shares(datamodule))
    modalities = {}
    for name, table in datamodule.tables.items():
        alone = strata.n_anchors if name == HIC and strata is not None else table.n_features
        vertices = np.arange(alone) if graph is None else np.array(datamodule.vertices(name))
        modalities[name] = ModalityInputs(
            n_features=table.n_features,
            n_batches=table.n_batches,
            vertices=vertices.astype(np.int64),
            features=_feature_names(table, layout if name == HIC else None),
            batches=table.batch_names.tolist() if hasattr(table, "batch_names") else None,
        )
    if graph is None:
        # a data module without a graph has one modality
        (own,) = (modality.vertices for modality in modalities.values())
        ones = np.ones(len(own), dtype=np.float32)
        found = GraphInputs(n_vertices=len(own), source=own, target=own, weight=ones, sign=ones)
    else:
        found = GraphInputs(
            n_vertices=len(graph.vertices),
            source=graph.source.astype(np.int64),
            target=graph.target.astype(np.int64),
            weight=graph.weight.astype(np.float32),
            sign=graph.sign.astype(np.float32),
        )
    paired = getattr(datamodule, "pairs", None) is not None
    return ModelInputs(modalities=modalities, strata=strata, graph=found, paired=paired)


def _shares(datamodule: "SingleCellDataModule") -> list[float] | None:
    """Return the strata's shares of the contacts of the training cells; None if not all of them are in memory."""
    table = datamodule.tables.get(HIC)
    # of a data module of another class only the names above are needed
    if datamodule.layout is None or table is None or not hasattr(datamodule, "training_rows"):
        return None
    if getattr(table, "columns", None) is not None or not hasattr(table, "counts"):
        return None
    counts = table.counts[datamodule.training_rows()[HIC]]
    # one more contact each: none has the share 0
    sums = [counts[:, stratum.start : stratum.stop].sum() + 1.0 for stratum in datamodule.layout.strata]
    shares: list[float] = (np.array(sums) / np.sum(sums)).tolist()
    return shares


def _feature_names(table: Any, layout: "FeatureLayout | None") -> list[str] | None:
    """Return the names of features, or of the anchors of a layout; None for a table of another class without names."""
    if layout is not None:
        names: list[str] = layout.anchor_names.tolist()
        return names
    return table.feature_names() if hasattr(table, "feature_names") else None


def difference(a: Any, b: Any) -> str | None:
    """Return the dotted name of the first entry in which nested dicts, lists and arrays differ, None if all agree."""
    if isinstance(a, dict | list) and type(a) is type(b):
        items = a.items() if isinstance(a, dict) else enumerate(a)
        names = list(a) if isinstance(a, dict) else range(len(a))
        if list(names) != (list(b) if isinstance(b, dict) else list(range(len(b)))):
            return "its entries"
        found = ((name, difference(item, b[name])) for name, item in items)
        return next((f"{name}.{inner}".removesuffix(".") for name, inner in found if inner is not None), None)
    return None if np.array_equal(a, b) else ""
