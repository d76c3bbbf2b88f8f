"""Define the autoencoders of all modalities, linked by a graph: they are made from data, encode cells, impute data."""

from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_amp.data.batch import Batch, CellBatch, datamodule_of
from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.likelihoods import PlainDecoder
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.models.inputs import HIC, TOTALS, ModelInputs, inputs_from
from lightning_amp.models.latents import Discriminator, Encoder, library_of
from lightning_amp.shapes import Counts, PerCell, PerVertex, Scalar

STREAMS_PER_MODALITY = 64
"""Streams of random numbers: dropout layers from the first on, latent and burn-in noise at the end."""
LATENT_STREAM, BURN_IN_STREAM = STREAMS_PER_MODALITY - 1, STREAMS_PER_MODALITY - 2
CHECKPOINT_KEY = "model_inputs"

Self = TypeVar("Self", bound="LinkedAutoencoders")


class LinkedAutoencoders(pl.LightningModule):
    """Abstract: networks that are made from the data; a subclass saves the hyper-parameters read here, and trains.

    A checkpoint can be loaded without the data.
    """

    encoders: nn.ModuleDict
    decoders: nn.ModuleDict
    takes_sparse_counts = True
    """Read by the data module: x of Hi-C may come by its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: ModelInputs | None = None  # what the networks were made from; None before they are

    @property
    def settings(self) -> Any:
        """The hyper-parameters, as attributes."""
        return self.hparams

    def build(self: Self, inputs: ModelInputs) -> Self:
        """Make the networks for some data, without a trainer."""
        if self.inputs is not None:
            raise ModelError(
                f"{type(self).__name__}.build was called, but its networks exist already; make a new "
                f"{type(self).__name__} for other data"
            )
        h = self.settings
        strangers = sorted(set(h.modality_weights or {}) - set(inputs.modalities))
        if strangers:
            raise ModelError(
                f"GLUE(modality_weights={h.modality_weights!r}) names {strangers!r}, but the data have "
                f"{list(inputs.modalities)!r}; name these only"
            )
        encoders: dict[str, nn.Module] = {}
        decoders: dict[str, nn.Module] = {}
        for i, (name, modality) in enumerate(inputs.modalities.items()):
            encoders[name] = Encoder(
                modality.n_features,
                h.latent_dim,
                hidden_dim=h.hidden_dim,
                hidden_depth=h.hidden_depth,
                dropout=h.dropout,
                total=TOTALS[name],
                stream=STREAMS_PER_MODALITY * i,
            )
        # after all encoders: another order would draw other first weights
        for name, modality in inputs.modalities.items():
            if name != HIC:
                decoders[name] = PlainDecoder(name, modality.n_features, modality.n_batches)
                continue
            assert inputs.strata is not None, "ModelInputs checks that Hi-C comes with strata"
            decoders[name] = StratifiedDecoder(
                h.latent_dim,
                inputs.strata.nodes,
                stratum_index=inputs.strata.distances,
                n_anchors=inputs.strata.n_anchors,
                n_batches=modality.n_batches,
                key=h.key,
                variant=h.variant,
                chained=h.chained,
                window=h.window,
            )
        self.encoders, self.decoders = nn.ModuleDict(encoders), nn.ModuleDict(decoders)
        graph = inputs.graph
        ends = {n: torch.from_numpy(getattr(graph, n)) for n in ("source", "target", "weight", "sign")}
        vertices = {name: torch.from_numpy(m.vertices) for name, m in inputs.modalities.items()}
        self.graph_encoder = GraphEncoder(graph.n_vertices, h.latent_dim, **ends, modalities=vertices)
        self.discriminator = Discriminator(
            h.latent_dim, len(inputs.modalities), width=h.discriminator_dim, depth=h.discriminator_depth
        )
        self.inputs = inputs
        return self

    def configure_model(self) -> None:
        """Build the networks from the trainer's data module, unless they exist."""
        # Lightning has no public question for a trainer: the property raises without one
        if self.inputs is not None or self._trainer is None:
            return
        datamodule = datamodule_of(self.trainer)
        if datamodule is None:
            raise ModelError(
                f"{type(self).__name__} was given to a Trainer without a data module, so its sizes are unknown; pass "
                "datamodule=SingleCellDataModule(...), or call build(inputs) first"
            )
        self.build(inputs_from(datamodule))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the inputs, so that the networks can be built without the data."""
        if self.inputs is not None:
            checkpoint[CHECKPOINT_KEY] = self.inputs.to_plain()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the networks the checkpoint was written with, or check that these are the same."""
        if CHECKPOINT_KEY not in checkpoint:
            raise ModelError(
                f"the checkpoint has no {CHECKPOINT_KEY!r}, only {sorted(checkpoint)!r}; load one that "
                f"{type(self).__name__} wrote"
            )
        inputs = ModelInputs.from_plain(checkpoint[CHECKPOINT_KEY])
        if self.inputs is None:
            self.build(inputs)
        elif (name := self.inputs.difference(inputs)) is not None:
            raise ModelError(
                f"the checkpoint was trained on other data: {name!r} differs; use the data it was trained on, "
                "or train anew"
            )

    def encode(self, modality: str, cells: CellBatch) -> tuple[PerCell, PerCell]:
        """Mean and deviation of the latents of some cells."""
        self.stream(modality)
        loc, std = self.encoders[modality](cells["x"], library_of(cells), cells.get("draw"))
        # mixed precision hands out halves, too coarse for divergences and likelihoods
        return loc.to(self.dtype), std.to(self.dtype)

    def vertices(self) -> tuple[PerVertex, PerVertex]:
        """Mean and deviation of the latents of the graph's vertices, under `nodes` of those that the rank holds."""
        loc, std = self.graph_encoder()
        return loc.to(self.dtype), std.to(self.dtype)

    def nll(self, modality: str, cells: CellBatch, *, u: PerCell, v: PerVertex) -> Scalar:
        """Negative log-likelihood of some cells' data, a mean over cells and features."""
        nll: Tensor = self.decoders[modality](
            u, self.graph_encoder.rows[modality](v), batch=cells["batch"], library=library_of(cells), x=cells["x"]
        )
        return nll

    def edge_nll(self, v: PerVertex, generator: torch.Generator | None = None) -> Scalar:
        """Negative log-likelihood of sampled edges; by the default generator when there is none."""
        h = self.settings
        return self.graph_encoder.nll(
            v, n_positive=h.edges_per_step, negatives=h.negatives_per_edge, generator=generator
        )

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, dict[str, Tensor]]:
        """Mean latent of every cell of the batch, with the cell's row in its file."""
        return {
            name: {"index": cells["index"], "embedding": self.encode(name, cells)[0]} for name, cells in batch.items()
        }

    @torch.no_grad()
    def impute(self, modality: str, batch: CellBatch) -> Counts:
        """Expected data of some cells of one modality, at the means of all latents; call in eval mode."""
        (u, _), (v, _) = self.encode(modality, batch), self.vertices()
        decoder = cast(StratifiedDecoder | PlainDecoder, self.decoders[modality])
        # the decoder gets the rows of its features, whichever vertices this rank holds
        rows = self.graph_encoder.rows[modality](v)
        return decoder.mean(u, rows, batch=batch["batch"], library=library_of(batch))

    def stream(self, modality: str) -> int:
        """First of the streams of random numbers that a modality may use."""
        if self.inputs is None:
            raise ModelError(
                f"{type(self).__name__} has no networks yet; call build(inputs), fit it with a data module, or "
                "load a checkpoint"
            )
        modalities = list(self.inputs.modalities)
        if modality not in modalities:
            raise ModelError(
                f"GLUE was given cells of {modality!r}, but was built for {modalities!r}; use the data it was built for"
            )
        return STREAMS_PER_MODALITY * modalities.index(modality)
