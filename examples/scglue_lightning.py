"""The network of the package scglue, untouched, in a LightningModule: the two steps of its trainer under Lightning.

    pip install '.[scglue]'   # in a clone of lightning_amp
    python examples/scglue_lightning.py [--out runs/scglue] [--devices 2] [--epochs 20]

Cells of synthetic Hi-C and RNA are embedded together, and the embeddings are written as h5ad. Before training and
after it, a logistic regression reads the cell types off the embeddings, in 5 folds.

    discriminator step    a D,    D: mean cross entropy over the cells of all modalities
    generator step        sum over modalities of (nll + kl) + g * modalities * (nll + kl of the graph) - a D

Noise is a function of the cell and of the step, so that ranks draw what one device would. Dropout draws by itself, as
in the package. Left out of its trainer: weights of cells, noise on the embeddings of the first epochs, early stopping.
"""

import argparse
from pathlib import Path

import anndata
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from scglue.models import sc
from scglue.models.scglue import SCGLUE
from scglue.num import normalize_edges
from scglue.utils import config
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import lightning_amp
from lightning_amp.data.batch import Batch
from lightning_amp.data.files.graphml import Graph
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.models.keyed_noise import keyed_normal

LAM_GRAPH, LAM_ALIGN, LEARNING_RATE = 0.02, 0.05, 2e-3
"""g, a and the rate, as in the package."""
DECODERS = {"hic": sc.ZINBDataDecoder, "rna": sc.NBDataDecoder}
EDGES, NEGATIVES = 512, 10
"""Edges of the graph per step, and how many that are none for each of them."""

Latents = dict[str, tuple[Normal, Tensor]]
"""modality -> distribution of the cells' latent, and their library"""


class LightningSCGLUE(LightningModule):
    """Trains an `SCGLUE` network on the batches of a `SingleCellDataModule`."""

    def __init__(self, network: SCGLUE, graph: Graph) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = network
        loop = graph.source == graph.target
        ends = np.stack((graph.source, graph.target))
        ends = np.concatenate((ends, ends[::-1, ~loop]), axis=1)
        weight, sign = (np.concatenate((a, a[~loop])) for a in (graph.weight, graph.sign))
        arrays = {"ends": ends, "weight": weight, "sign": sign, "norm": normalize_edges(ends, weight)}
        for name, array in arrays.items():
            self.register_buffer(name, torch.as_tensor(array))

    def encode(self, batch: Batch) -> Latents:
        """Latents of the cells; the empty tensor says that there is no other input than the counts."""
        x = {name: cells["x"] for name, cells in batch.items()}
        return {name: self.network.x2u[name](x[name], x[name].new_empty(0)) for name in x}

    def discriminator_loss(self, batch: Batch, latents: Latents | None = None) -> Tensor:
        """How badly the discriminator tells the cells' modality."""
        means = torch.cat([u.mean for u, _ in (latents or self.encode(batch)).values()])
        batches = torch.cat([cells["batch"] for cells in batch.values()])
        which = [torch.full_like(cells["batch"], self.network.keys.index(k)) for k, cells in batch.items()]
        return LAM_ALIGN * F.cross_entropy(self.network.du(means, batches), torch.cat(which))

    def graph_loss(self, u: Normal, v: Tensor, random: torch.Generator) -> Tensor:
        """Edges drawn by weight against edges to random vertices, and the divergence of the vertices."""
        chosen = torch.multinomial(self.weight, EDGES, replacement=True, generator=random)
        (source, target), sign = self.ends[:, chosen], self.sign[chosen]
        others = torch.randint(len(v), (NEGATIVES * EDGES,), generator=random, device=self.device)
        real = self.network.v2g(v, (source, target), sign)
        false = self.network.v2g(v, (source.repeat(NEGATIVES), others), sign.repeat(NEGATIVES))
        nll = -(real.log_prob(v.new_ones(())).mean() + false.log_prob(v.new_zeros(())).mean()) / 2
        return nll + kl_divergence(u, self.network.prior()).sum(1).mean() / len(v)

    def generator_loss(self, batch: Batch) -> Tensor:
        """What all but the discriminator lower, against whom they work."""
        network, latents = self.network, self.encode(batch)
        random = torch.Generator(self.device).manual_seed(self.global_step)
        vertices = network.g2v(self.ends, self.norm, self.sign)
        noise = torch.randn(vertices.mean.shape, generator=random, device=self.device, dtype=self.norm.dtype)
        v = vertices.mean + vertices.stddev * noise
        loss = LAM_GRAPH * len(latents) * self.graph_loss(vertices, v, random)
        for stream, (name, (u, library)) in enumerate(latents.items()):
            x, draw, batches = (batch[name][key] for key in ("x", "draw", "batch"))
            cells = u.mean + u.stddev * keyed_normal(draw, u.mean.shape[1], stream=stream, dtype=x.dtype)
            decoded = network.u2x[name](cells, v[getattr(network, f"{name}_idx")], batches, library)
            loss = loss - decoded.log_prob(x).mean()
            loss = loss + kl_divergence(u, network.prior()).sum(1).mean() / x.shape[1]
        return loss - self.discriminator_loss(batch, latents)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """The discriminator's step, then the generator's."""
        steps = zip(self.optimizers(), (self.discriminator_loss, self.generator_loss), strict=True)
        for optimizer, loss_of in steps:
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(loss := loss_of(batch))
                optimizer.step()
            self.log(loss_of.__name__, loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=1)

    def on_train_epoch_end(self) -> None:
        """Say how it goes."""
        losses = (f"{name} {value:.4f}" for name, value in self.trainer.callback_metrics.items())
        self.print(f"epoch {self.current_epoch:3d}", *losses, sep="   ")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, dict[str, Tensor]]:
        """What `PredictionWriter` writes."""
        means = {name: u.mean for name, (u, _) in self.encode(batch).items()}
        return {name: {"index": batch[name]["index"], "embedding": mean} for name, mean in means.items()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for the discriminator, one for all others."""
        judge = list(self.network.du.parameters())
        others = [p for name, p in self.network.named_parameters() if not name.startswith("du.")]
        return [torch.optim.RMSprop(parameters, lr=LEARNING_RATE) for parameters in (judge, others)]


def build(
    data: lightning_amp.SingleCellDataModule, *, dim: int = 32, hidden: int = 128, dropout: float = 0.2
) -> SCGLUE:
    """The package's network for Hi-C and RNA counts; a contact is decoded from the vertex of its first bin."""
    config.CPU_ONLY = True  # else the network takes a device by itself, and hides the others from Lightning
    bins = np.concatenate([stratum.anchors for stratum in data.layout.strata])
    vertices = {"hic": data.vertices("hic")[bins], "rna": data.vertices("rna")}
    size = {"h_depth": 2, "h_dim": hidden, "dropout": dropout}
    return SCGLUE(
        sc.GraphEncoder(len(data.graph.vertices), dim),
        sc.GraphDecoder(),
        {name: sc.NBDataEncoder(len(rows), dim, **size) for name, rows in vertices.items()},
        {name: decoder(len(vertices[name]), data.tables[name].n_batches) for name, decoder in DECODERS.items()},
        {name: torch.as_tensor(rows) for name, rows in vertices.items()},
        sc.Discriminator(dim, len(vertices), **size),
        sc.Prior(),
    )


def score(embeddings: Path) -> float:
    """Share of cells whose type a logistic regression reads off their embedding, in 5 folds."""
    cells = anndata.read_h5ad(embeddings)
    model = LogisticRegression(max_iter=1000)
    return float(cross_val_score(model, cells.obsm["X_amp"], cells.obs["celltype"]).mean())


def main() -> None:
    """Make data, train, and write the embeddings."""
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**about)
    parser.add_argument("--out", type=Path, default=Path("runs/scglue"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    asked = parser.parse_args()
    folder = asked.out / "data"
    if not folder.exists():  # every rank runs this; the first makes the data before it starts the others
        asked.out.mkdir(parents=True, exist_ok=True)
        synthesize(folder)
    data = lightning_amp.SingleCellDataModule(folder, batch_size=16)
    data.setup()
    torch.manual_seed(0)
    module = LightningSCGLUE(build(data), data.graph)
    writer = lightning_amp.PredictionWriter(asked.out, contact_map_cells=0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    size = {"accelerator": "cpu", "devices": asked.devices, "max_epochs": asked.epochs}
    trainer = Trainer(strategy="amp", callbacks=[writer], limit_val_batches=0, **size, **quiet)
    for trained in ("before training", "after training"):
        if trained == "after training":
            trainer.fit(module, data)
        trainer.predict(module, data, return_predictions=False)
        for file in (path for path in writer.written if path.suffix == ".h5ad"):
            print(f"{trained}: {score(file):.0%} of the cell types are read off {file}")


if __name__ == "__main__":
    main()
