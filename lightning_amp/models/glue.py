"""Define the reference model: variational autoencoders of all modalities, joined by a guidance graph and an adversary.

    loss = lam_data sum_m weight_m (nll_m + lam_kl kl_m / F_m) + lam_graph M (graph nll + lam_kl kl / V)
           - lam_align (discriminator loss)

The encoder of a modality computes u of a cell, the graph encoder v of a feature; decoders read both. Every step trains
the discriminator on the detached u first, then the rest; both use one pass through the encoders.

Legend: cell, feature, dim; M modalities, F_m features of modality m, V vertices of the graph.
"""

from typing import Any, Literal, Self, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lightning_amp.data.batch import Batch, CellBatch, hash_integers
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.likelihoods import Output, PlainDecoder
from lightning_amp.models.decoders.stratified import KeyKind, StratifiedDecoder
from lightning_amp.models.decoders.stratum_keys import Variant
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.models.inputs import HIC, TOTALS, ModelInputs
from lightning_amp.models.latents import (
    Discriminator,
    Encoder,
    Latent,
    alignment_loss,
    library_of,
    noise_for,
    normal_kl,
    one_of,
    sample,
)
from lightning_amp.models.nearby import nearby
from lightning_amp.models.representation import projection_of
from lightning_amp.models.settings import REP_DIM, Representation, Stage, check_names, check_settings, components_of
from lightning_amp.models.start_values import parameter_sets
from lightning_amp.models.trained_model import TrainedModel
from lightning_amp.shapes import Counts, PerCell, PerVertex, Scalar

STREAMS_PER_MODALITY = 64  # of random numbers: dropout layers from the first on, latent and burn-in noise at the end
LATENT_STREAM, BURN_IN_STREAM, PAIR_STREAM = (STREAMS_PER_MODALITY - n for n in (1, 2, 3))
VALIDATION_SEED = 0  # of the edges that are drawn for `val_loss`: the same ones after every epoch
BURN_IN_NOISE = 1.5  # deviation of the first epoch's noise on the discriminator's inputs; the latent's prior has 1


class GLUE(TrainedModel):
    """Graph-linked autoencoders of Hi-C, RNA, ATAC and methylation cells; independent of devices and ranks.

    Networks are built from the trainer's data module before `fit`, from a checkpoint, or by `build(inputs)`. Random
    draws for the graph depend on the step and `seed`, torch's when the model was made; those of a cell on its `draw`.
    Of paired cells, all decoders read the latent of one modality, which is drawn for each cell and step.

    Args:
        latent_dim: channels D of all latents; even for local attention.
        hidden_dim: channels of the encoders' hidden layers.
        hidden_depth: hidden layers of the encoders.
        dropout: of the encoders.
        use_rep: what the encoders read: "counts", or "pca", the components of normalised counts (representation.py),
            which the latents begin as.
        rep_dim: components of "pca", of all modalities or by modality; 50 for those not named.
        key: "attention" (local), "full_attention" or "convolution" keys of the Hi-C strata.
        variant: form of the attention key, "higlue" or "paper".
        chained: whether the attention key of a stratum reads the previous one's projected anchors.
        window: anchors per bucket of local attention; 20 times the number of strata when None.
        lam_data: weight of the modalities' terms.
        lam_kl: weight of the divergences from the prior.
        lam_graph: weight of the graph's terms.
        lam_align: weight of the adversary.
        lr: learning rate of both RMSprop optimisers.
        stage: "pretrain" trains without the adversary.
        align_burnin: epochs in which the noise on the discriminator's inputs decreases to 0; 0 for no noise.
        modality_weights: weight of each modality's term; 1 for those not named.
        edges_per_step: positive edges of the graph drawn in a step.
        negatives_per_edge: negative edges drawn for each positive one.
        discriminator_dim: channels of the discriminator's hidden layers.
        discriminator_depth: hidden layers of the discriminator.

    Raises:
        ModelError: unknown stage, key or variant, or no hidden layer.
    """

    seed: Tensor
    encoders: nn.ModuleDict
    decoders: nn.ModuleDict
    takes_sparse_counts = True
    """Read by the data module: x of Hi-C may be SparseCounts."""

    def __init__(
        self,
        latent_dim: int = 64,
        hidden_dim: int = 128,
        *,
        hidden_depth: int = 2,
        dropout: float = 0.2,
        use_rep: Representation = "counts",
        rep_dim: int | dict[str, int] = REP_DIM,
        key: KeyKind = "attention",
        variant: Variant = "higlue",
        chained: bool = False,
        window: int | None = None,
        lam_data: float = 1.0,
        lam_kl: float = 1.0,
        lam_graph: float = 0.1,
        lam_align: float = 0.02,
        lr: float = 2e-3,
        stage: Stage = "finetune",
        align_burnin: int = 10,
        modality_weights: dict[str, float] | None = None,
        edges_per_step: int = 4096,
        negatives_per_edge: int = 10,
        discriminator_dim: int = 128,
        discriminator_depth: int = 2,
    ):
        super().__init__()
        self.inputs: ModelInputs | None = None  # inputs of `build`; None until the networks exist
        check_settings(
            stage=stage, key=key, variant=variant, use_rep=use_rep, hidden_depth=hidden_depth, rep_dim=rep_dim
        )
        self.save_hyperparameters()
        self.automatic_optimization = False
        # the buffer below is int64
        self._seed = torch.initial_seed() % 2**63
        self.register_buffer("seed", torch.tensor(self._seed))

    @property
    def settings(self) -> Any:
        """Hyper-parameters as attributes."""
        return self.hparams

    def build(self, inputs: ModelInputs) -> Self:
        """Create the networks for some data, without a trainer."""
        if self.inputs is not None:
            raise ModelError(
                f"{type(self).__name__}.build was called, but its networks exist already; make a new "
                f"{type(self).__name__} for other data"
            )
        h = self.settings
        check_names("modality_weights", h.modality_weights, inputs.modalities)
        check_names("rep_dim", h.rep_dim if isinstance(h.rep_dim, dict) else None, inputs.modalities)
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
                projection=projection_of(name, inputs, components_of(name, h.rep_dim)) if h.use_rep == "pca" else None,
            )
        # created after all encoders: the order determines the initial weights
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
                shares=inputs.strata.shares,
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

    def encode(self, modality: str, cells: CellBatch) -> tuple[PerCell, PerCell]:
        """Return mean and standard deviation of the latents of some cells."""
        self.stream(modality)
        loc, std = self.encoders[modality](cells["x"], library_of(cells), cells.get("draw"))
        # 16-bit results of mixed precision are too coarse for divergences and likelihoods
        return loc.to(self.dtype), std.to(self.dtype)

    def vertices(self) -> tuple[PerVertex, PerVertex]:
        """Return mean and standard deviation of the vertices' latents; under `nodes`, of this rank's vertices."""
        loc, std = self.graph_encoder()
        return loc.to(self.dtype), std.to(self.dtype)

    def nll(self, modality: str, cells: CellBatch, *, u: PerCell, v: PerVertex) -> Scalar:
        """Return the negative log-likelihood of some cells' data, the mean over cells and features."""
        nll: Tensor = self.decoders[modality](
            u, self.graph_encoder.rows[modality](v), batch=cells["batch"], library=library_of(cells), x=cells["x"]
        )
        return nll

    def edge_nll(self, v: PerVertex, generator: torch.Generator | None = None) -> Scalar:
        """Return the negative log-likelihood of sampled edges; None is the default generator."""
        h = self.settings
        return self.graph_encoder.nll(
            v, n_positive=h.edges_per_step, negatives=h.negatives_per_edge, generator=generator
        )

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, dict[str, Tensor]]:
        """Return the mean latent of every cell of the batch, and the cell's row in its file."""
        return {
            name: {"index": cells["index"], "embedding": self.encode(name, cells)[0]} for name, cells in batch.items()
        }

    @torch.no_grad()
    def impute(self, modality: str, batch: CellBatch, *, output: Output | Literal["nearby"] = "expected") -> Counts:
        """Return the expected data of some cells, or another `Output`, at the means of latents; call in eval mode.

        "nearby", of Hi-C, are the expected contacts given the cell's own contacts at nearby pairs (nearby.py).
        """
        if output == "nearby" and modality != HIC:
            raise ModelError(
                f"GLUE.impute({modality!r}, output='nearby') was asked for; only {HIC!r} has pairs of bins, use"
                " output='expected'"
            )
        (u, _), (v, _) = self.encode(modality, batch), self.vertices()
        decoder = cast(StratifiedDecoder | PlainDecoder, self.decoders[modality])
        rows = self.graph_encoder.rows[modality](v)  # of all features, even if vertices are sharded
        kind: Output = "expected" if output == "nearby" else output
        found = decoder.predicted(u, rows, batch=batch["batch"], library=library_of(batch), output=kind)
        if output != "nearby":
            return found
        assert self.inputs is not None, "encode has checked that the networks are there"
        assert self.inputs.strata is not None, "ModelInputs checks that Hi-C comes with strata"
        x = batch["x"]
        return nearby(found, x.to_dense(found.dtype) if isinstance(x, SparseCounts) else x, self.inputs.strata)

    def stream(self, modality: str) -> int:
        """Return the first random stream of a modality, which has STREAMS_PER_MODALITY of them."""
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

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer for the discriminator and one for the rest, with known shares of strata as they are."""
        sets = parameter_sets(self.named_parameters(), self.inputs)
        return [torch.optim.RMSprop(parameters, lr=self.settings.lr) for parameters in sets]

    def on_train_start(self) -> None:
        """Read the seed, which has been broadcast from rank 0 or loaded from the checkpoint."""
        self._seed = int(self.seed)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Train the discriminator, unless the batch or the stage has none, then all other parameters."""
        critic, generator = cast(list[LightningOptimizer], self.optimizers())
        latents = self.latents(batch)
        shown = self.shown(batch, latents)
        if shown:
            # detached: the discriminator's step must not change the encoders. It runs before `terms`, because it writes
            # to parameters that `terms` would otherwise have saved for the second backward pass
            detached = {label: u.detach() for label, u in shown.items()}
            self.leave_uncounted(critic)
            self._step(critic, alignment_loss(self.discriminator, detached, frozen=False))
        # seeded by the step, so that a resumed run draws the same noise and edges
        random = self._generator(self._seed, self.current_epoch, batch_idx)
        terms = self.terms(batch, latents, shown=shown, generator=random)
        self._step(generator, terms["loss"])
        n_cells = len(next(iter(batch.values()))["index"])
        self.log_losses(terms, n_cells=n_cells)

    def latents(self, batch: Batch) -> dict[str, Latent]:
        """Sample the latents of all cells of a batch."""
        result = {}
        for name, cells in batch.items():
            stream = self.stream(name) + LATENT_STREAM
            result[name] = sample(*self.encode(name, cells), draw=cells.get("draw"), stream=stream)
        return result

    def terms(
        self,
        batch: Batch,
        latents: dict[str, Latent],
        *,
        shown: dict[int, Tensor],
        generator: torch.Generator | None = None,
    ) -> dict[str, Scalar]:
        """Return the loss terms of all parts except the discriminator, and their weighted sum as "loss"."""
        # `shown`: the discriminator's inputs by class of a modality, empty without an adversary;
        # `generator`: for the vertices' noise and the sampled edges, None is the default one
        h, v = self.settings, self.graph_encoder.sample(*self.vertices(), generator)
        terms = {"nll_graph": self.edge_nll(v.sample, generator), "kl_graph": self.graph_encoder.kl(v.loc, v.std)}
        total = h.lam_graph * len(self.encoders) * (terms["nll_graph"] + h.lam_kl * terms["kl_graph"])
        read = self.read(batch, latents)
        for name, cells in batch.items():
            u = latents[name]
            nll = self.nll(name, cells, u=read[name], v=v.sample)
            kl = normal_kl(u.loc, u.std) / cells["x"].shape[1]
            terms |= {f"nll_{name}": nll, f"kl_{name}": kl}
            total = total + h.lam_data * self._weight(name) * (nll + h.lam_kl * kl)
        if shown:
            terms["alignment"] = alignment_loss(self.discriminator, shown, frozen=True)
            # minus: the encoders are trained against the discriminator
            total = total - h.lam_align * terms["alignment"]
        return {"loss": total, **terms}

    def read(self, batch: Batch, latents: dict[str, Latent]) -> dict[str, PerCell]:
        """Return what each decoder reads: its modality's samples or, of paired cells, those that are drawn."""
        samples = {name: u.sample for name, u in latents.items()}
        assert self.inputs is not None, "encode has checked that the networks are there"
        if not self.inputs.paired or len(samples) == 1:
            return samples
        first = next(iter(batch))
        rows = {name: len(u) for name, u in samples.items()}
        if len(set(rows.values())) > 1:
            raise ModelError(f"GLUE got a batch of {rows!r} paired cells; give the same cells of every modality")
        stream = self.stream(first) + PAIR_STREAM
        return dict.fromkeys(samples, one_of([*samples.values()], draw=batch[first].get("draw"), stream=stream))

    def on_validation_epoch_start(self) -> None:
        """Reset the sums of the previous validation."""
        self._validated = torch.zeros(len(self.encoders), 2, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Sum each modality's term over its cells, at the means of all latents."""
        v, _ = self.vertices()
        for row, name in enumerate(self.encoders):
            if name in batch:
                loc, std = self.encode(name, batch[name])
                kl = normal_kl(loc, std) / batch[name]["x"].shape[1]
                term = self.nll(name, batch[name], u=loc, v=v) + self.settings.lam_kl * kl
                # weighted by cells, because batches differ in size; a repeated cell counts on another rank
                n_cells = 0 if batch[name].get("repeated") else len(loc)
                self._validated[row] += torch.stack((term, torch.ones_like(term))) * n_cells

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`: the loss without the adversary, averaged over the cells of all ranks."""
        self._log_validated("val_loss")

    def on_test_epoch_start(self) -> None:
        """Do the same as `on_validation_epoch_start`."""
        self.on_validation_epoch_start()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Do the same as `validation_step`."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log `test_loss`, computed like `val_loss`."""
        self._log_validated("test_loss")

    def _log_validated(self, name: str) -> None:
        # sums and cell counts of all ranks: a mean of means would weight ranks equally
        gathered = cast(Tensor, self.all_gather(self._validated))
        totals = gathered.reshape(-1, len(self.encoders), 2).sum(0)
        means = totals[:, 0] / totals[:, 1].clamp_min(1)
        h, (loc, std) = self.settings, self.vertices()
        kl = self.graph_encoder.kl(loc, std)
        loss = h.lam_graph * len(means) * (self.edge_nll(loc, self._generator(VALIDATION_SEED)) + h.lam_kl * kl)
        for modality, mean in zip(self.encoders, means, strict=True):
            loss = loss + h.lam_data * self._weight(modality) * mean
        self.log(name, loss, prog_bar=True, sync_dist=True)

    def shown(self, batch: Batch, latents: dict[str, Latent]) -> dict[int, PerCell]:
        """Return the discriminator's inputs: samples of each modality with burn-in noise, by class of the modality."""
        if self.settings.stage == "pretrain" or len(self.encoders) == 1:
            return {}
        burn_in = self.settings.align_burnin
        size = BURN_IN_NOISE * max(1 - self.current_epoch / burn_in, 0.0) if burn_in else 0.0
        shown = {}
        for name, u in latents.items():
            stream = self.stream(name) + BURN_IN_STREAM
            noise = noise_for(u.sample, draw=batch[name].get("draw"), stream=stream) if size else 0.0
            shown[list(self.encoders).index(name)] = u.sample + size * noise
        return shown

    def _step(self, optimizer: LightningOptimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def _generator(self, *key: int) -> torch.Generator:
        # the meta device has no generator, and accepts any
        device = "cpu" if self.device.type == "meta" else self.device
        return torch.Generator(device).manual_seed(hash_integers(*key))

    def _weight(self, modality: str) -> float:
        return float((self.settings.modality_weights or {}).get(modality, 1.0))
