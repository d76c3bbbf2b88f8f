"""The autoencoders of all modalities, linked by a graph: made from the data, encode cells, impute data.

Legend: cell, feature, dim; anchors and genes are vertices of the guidance graph, own_vertex those of a device.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.models import networks
from lightning_amp.models.built_from_data import BuiltFromData
from lightning_amp.models.inputs import ModelInputs
from lightning_amp.models.latent import Discriminator, library_of
from lightning_amp.shapes import Counts, PerCell, PerVertex, Scalar

if TYPE_CHECKING:
    from lightning_amp.data.batch import Batch, CellBatch

LATENT_STREAM, BURN_IN_STREAM = networks.STREAMS_PER_MODALITY - 1, networks.STREAMS_PER_MODALITY - 2


class LinkedAutoencoders(BuiltFromData):
    """Abstract: a subclass saves the hyper-parameters that are read here, and trains."""

    encoders: nn.ModuleDict
    decoders: nn.ModuleDict
    takes_sparse_counts = True
    """Read by the data module: x of Hi-C may come by its entries."""

    @property
    def settings(self) -> Any:
        """The hyper-parameters, as attributes."""
        return self.hparams

    def make_networks(self, inputs: ModelInputs) -> None:
        """Make the networks for some data.

        Raises:
            ModelError: modality_weights names a modality that there is not.
        """
        h = self.settings
        strangers = sorted(set(h.modality_weights or {}) - set(inputs.modalities))
        if strangers:
            raise ModelError(
                f"GLUE(modality_weights={h.modality_weights!r}) names {strangers!r}, but the data have "
                f"{list(inputs.modalities)!r}; name these only"
            )
        self.encoders = networks.make_encoders(
            inputs, h.latent_dim, hidden_dim=h.hidden_dim, hidden_depth=h.hidden_depth, dropout=h.dropout
        )
        self.decoders = networks.make_decoders(
            inputs, h.latent_dim, key=h.key, variant=h.variant, chained=h.chained, window=h.window
        )
        self.graph_encoder = networks.make_graph_encoder(inputs, h.latent_dim)
        self.discriminator = Discriminator(
            h.latent_dim, len(inputs.modalities), width=h.discriminator_dim, depth=h.discriminator_depth
        )

    def encode(self, modality: str, cells: "CellBatch") -> tuple[PerCell, PerCell]:
        """Mean and deviation of the latents of some cells.

        Raises:
            ModelError: the networks are not built, or have no such modality.
        """
        self.stream(modality)
        loc, std = self.encoders[modality](cells["x"], library_of(cells), cells.get("draw"))
        # mixed precision hands out halves, too coarse for divergences and likelihoods
        return loc.to(self.dtype), std.to(self.dtype)

    def vertices(self) -> tuple[PerVertex, PerVertex]:
        """Mean and deviation of the latents of the graph's vertices, under `nodes` of those that the rank holds."""
        loc, std = self.graph_encoder()
        return loc.to(self.dtype), std.to(self.dtype)

    def nll(self, modality: str, cells: "CellBatch", *, u: PerCell, v: PerVertex) -> Scalar:
        """Negative log-likelihood of some cells' data, a mean over cells and features."""
        nll: Tensor = self.decoders[modality](
            u,
            self.graph_encoder.rows[modality](v),
            batch=cells["batch"],
            library=library_of(cells),
            x=cells["x"],
        )
        return nll

    def edge_nll(self, v: PerVertex, generator: torch.Generator | None = None) -> Scalar:
        """Negative log-likelihood of sampled edges; by the default generator when there is none."""
        h = self.settings
        return self.graph_encoder.nll(
            v, n_positive=h.edges_per_step, negatives=h.negatives_per_edge, generator=generator
        )

    def predict_step(self, batch: "Batch", batch_idx: int) -> dict[str, dict[str, Tensor]]:
        """Mean latent of every cell of the batch, with the cell's row in its file."""
        return {
            name: {"index": cells["index"], "embedding": self.encode(name, cells)[0]}
            for name, cells in batch.items()
        }

    @torch.no_grad()
    def impute(self, modality: str, batch: "CellBatch") -> Counts:
        """Expected data of some cells of one modality, at the means of all latents; call in eval mode.

        Raises:
            ModelError: the networks are not built, or have no such modality.
        """
        (u, _), (v, _) = self.encode(modality, batch), self.vertices()
        decoder = cast(networks.DataDecoder, self.decoders[modality])
        rows = self.graph_encoder.rows[modality](v)
        return decoder.mean(u, rows, batch=batch["batch"], library=library_of(batch))

    def stream(self, modality: str) -> int:
        """First of the streams of random numbers that a modality may use.

        Raises:
            ModelError: the networks are not built, or have no such modality.
        """
        inputs = self.built_inputs()
        if modality not in inputs.modalities:
            raise ModelError(
                f"GLUE was given cells of {modality!r}, but was built for {list(inputs.modalities)!r}; "
                "use the data it was built for"
            )
        return networks.first_stream(inputs, modality)
