"""Build the simulated module and batch on fake tensors of the right sizes.

All tensors are on the meta device, except the anchors of the strata's features: S4 tests whether they are consecutive,
because consecutive keys need no copy. A profile has only their number F_k: they are assumed to be consecutive if F_k >=
N - k, as on one chromosome, and otherwise spread over all anchors.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.data.files.pairs import is_paired
from lightning_amp.data.loading.datamodule import is_sparse
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.models.decoders.stratified import KeyKind, StratifiedDecoder
from lightning_amp.models.decoders.stratum_keys import Variant
from lightning_amp.models.glue import GLUE
from lightning_amp.models.inputs import HIC, GraphInputs, ModalityInputs, ModelInputs, StrataInputs
from lightning_amp.profiling.profile import ModalityProfile, Profile
from lightning_amp.techniques.hic.scores import nonzero_counts

LEARNING_RATE = 2e-3


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Subject:
    """A module without values, and its batch.

    Attributes:
        share: Share of the counts that are assumed not to be zero.
    """

    module: LightningModule
    batch: Any
    share: float = nonzero_counts.ASSUMED.share


class DecoderAlone(LightningModule):
    """A decoder with a training step on given latents of cells and anchors, which get gradients.

    Args:
        shape: Sizes of the decoder; its name becomes the name of the child.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fqn = shape.fqn
        decoder = StratifiedDecoder(
            shape.dim,
            _nodes(shape.anchors, shape.features, shape.distances),
            stratum_index=shape.distances,
            n_anchors=shape.anchors,
            n_batches=shape.n_batches,
            key=_key(shape.attention, shape.full),
            variant=cast(Variant, shape.variant),
            chained=shape.chained,
            window=None if shape.full else shape.window,
        )
        self.add_module(shape.fqn, decoder)

    def configure_optimizers(self) -> list[Optimizer]:
        """Return one optimiser, as in the reference model."""
        return [torch.optim.RMSprop(self.parameters(), lr=LEARNING_RATE)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Run forward, backward and update."""
        optimizer = cast(Optimizer, self.optimizers())
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss at the latents of cells and anchors in the batch."""
        return self.decoded(batch, batch["v"].detach().requires_grad_())

    def decoded(self, batch: dict[str, Tensor], v: Tensor) -> Tensor:
        """Return the decoder's loss at some latents of anchors."""
        cells = {name: batch[name] for name in ("batch", "library", "x")}
        # another tensor, so that a batch keeps no gradient for a next step
        nll: Tensor = self.get_submodule(self.fqn)(batch["u"].detach().requires_grad_(), v, **cells)
        return nll


def decoder_subject(shape: DecoderShape, *, batch_size: int, kind: type[DecoderAlone] = DecoderAlone) -> Subject:
    """Return a module with only a decoder, and a batch of `batch_size` cells per rank."""
    with torch.device("meta"):
        module = kind(shape)
        batch = _cells(batch_size, sum(shape.features))
        batch |= {"u": torch.empty(batch_size, shape.dim), "v": torch.empty(shape.anchors, shape.dim)}
    _give_nodes(module.get_submodule(shape.fqn), _nodes(shape.anchors, shape.features, shape.distances))
    return Subject(module=module, batch=batch)


def reference_subject(profile: Profile, *, batch_size: int, latent_dim: int, window: int | None) -> Subject:
    """Return the reference model for some data, and a batch of `batch_size` cells per rank and modality."""
    inputs = _inputs(profile)
    parts = [m.decomposition for m in profile.modalities if m.decomposition is not None]
    key = _key(any(one.attention for one in parts), any(one.full for one in parts))
    with torch.device("meta"):
        module = GLUE(latent_dim, key=key, window=window).build(inputs)
        batch = {}
        for m in profile.modalities:
            draw, index = (torch.empty(batch_size, dtype=torch.int64) for _ in range(2))
            batch[m.name] = _cells(batch_size, m.features) | {"draw": draw, "index": index}
    module.to("meta")
    for m in profile.modalities:
        if m.name == HIC and is_sparse(m.features, share_of(m)):
            batch[HIC]["x"] = _sparse(m, batch_size)
    # a number that the model reads
    module.seed = torch.zeros_like(module.seed, device="cpu")
    if inputs.strata is not None:
        _give_nodes(module.decoders[HIC], inputs.strata.nodes)
    return Subject(
        module=module, batch=batch, share=next((share_of(m) for m in profile.modalities if m.name == HIC), 1.0)
    )


def _key(attention: bool, full: bool) -> KeyKind:
    return "full_attention" if full else "attention" if attention else "convolution"


def _cells(n: int, n_features: int) -> dict[str, Any]:
    return {"x": torch.empty(n, n_features), "library": torch.empty(n, 1), "batch": torch.empty(n, dtype=torch.int64)}


def share_of(modality: ModalityProfile) -> float:
    """Return the share of the counts that are not zero, 1 for a dense matrix."""
    return 1.0 if modality.zeros is None else 1.0 - modality.zeros


def _sparse(modality: ModalityProfile, n: int) -> SparseCounts:
    """Return sparse counts with as many entries as cells have on average, spread evenly.

    They have values: a counted step reads where they are.
    """
    size = n * modality.features
    entries = round(share_of(modality) * size)
    column, row = np.divmod(np.arange(entries) * size // max(entries, 1), n)
    found = [torch.from_numpy(part) for part in (row, column, np.ones(entries, dtype=np.float32))]
    return SparseCounts(found[0], found[1], found[2], (n, modality.features), host=(row, column))


def _nodes(n_anchors: int, features: tuple[int, ...], distances: tuple[int, ...]) -> list[NDArray[np.int64]]:
    spread = [np.arange(n, dtype=np.int64) for n in features]
    return [
        rows if len(rows) >= n_anchors - k else rows * n_anchors // len(rows)
        for rows, k in zip(spread, distances, strict=True)
    ]


def _give_nodes(decoder: nn.Module, nodes: list[NDArray[np.int64]]) -> None:
    for stratum, rows in zip(cast(StratifiedDecoder, decoder).strata, nodes, strict=True):
        stratum.feature_anchor = torch.from_numpy(rows)


def _inputs(profile: Profile) -> ModelInputs:
    modalities, strata = {}, None
    for m in profile.modalities:
        parts = m.decomposition
        n_vertices = m.features if parts is None else parts.anchors
        modalities[m.name] = ModalityInputs(
            n_features=m.features, n_batches=m.batches, vertices=np.arange(n_vertices, dtype=np.int64)
        )
        if parts is not None:
            nodes = _nodes(parts.anchors, parts.features, parts.distances)
            strata = StrataInputs(n_anchors=parts.anchors, nodes=nodes, distances=list(parts.distances))
    files = {m.name: Path(profile.data_dir) / m.file for m in profile.modalities}
    paired = all(file.is_file() for file in files.values()) and is_paired(files)
    return ModelInputs(modalities=modalities, strata=strata, graph=_graph(profile, modalities), paired=paired)


def _graph(profile: Profile, modalities: dict[str, ModalityInputs]) -> GraphInputs:
    """Return a graph of the right size: self-loops on all vertices, other edges to the next vertex."""
    if profile.graph is None:
        vertices = edges = max(len(m.vertices) for m in modalities.values())
    else:
        vertices, edges = profile.graph.vertices, profile.graph.edges
    source = np.arange(edges, dtype=np.int64)
    other = source >= vertices
    ones = np.ones(edges, dtype=np.float32)
    return GraphInputs(
        n_vertices=vertices, source=source % vertices, target=(source + other) % vertices, weight=ones, sign=ones
    )
