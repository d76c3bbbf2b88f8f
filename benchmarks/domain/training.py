"""Train two small models as the ShardTensor paper does, with every sample split over ranks, through the Trainer.

    python -m benchmarks.domain.training transolver     (about 10 minutes)
    python -m benchmarks.domain.training storm          (about 2 minutes)

transolver: pressure and velocity around a sphere (potential flow, whose solution is known) at 512 points a rank, on 1,
2 and 4 ranks, so that the resolution grows with the ranks (Figure 5 of the paper): relative L2 errors on spheres that
were not trained on. storm: a diffusion model with neighbourhood attention in windows of 49 x 49 over an image, on 2
data x 2 domain ranks (Section V-B2): the losses beside those of 2 data ranks with whole images, in float64.

Processes on this machine, connected by gloo. Data are synthetic and drawn by seed.
"""

import argparse
import os
import subprocess
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.domain.models import Neighbours, Points
from lightning_amp import AMPStrategy

EPOCHS = 250
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def spheres(n: int, points: int, seed: int) -> TensorDataset:
    """Points around n spheres: [n, points, 4] places and distances to the surface, [n, points, 4] pressure, velocity.

    Potential flow of speed 1 along x around a sphere of radius a:
    v = (1 + a^3 / 2 r^3) e_x - (3 a^3 x / 2 r^5) (x, y, z), and the pressure coefficient is 1 - |v|^2.
    """
    draw = torch.Generator().manual_seed(seed)
    radius = 0.3 + 0.5 * torch.rand(n, 1, 1, generator=draw)
    way = F.normalize(torch.randn(n, points, 3, generator=draw), dim=-1)
    away = radius + 1.5 * torch.rand(n, points, 1, generator=draw)
    at, ratio = away * way, (radius / away) ** 3
    velocity = -1.5 * ratio * way[..., :1] * way
    velocity[..., :1] += 1 + ratio / 2
    pressure = 1 - velocity.square().sum(-1, keepdim=True)
    return TensorDataset(torch.cat([at, away - radius], -1), torch.cat([pressure, velocity], -1))


class Flow(Points):
    """A Transolver that predicts pressure and velocity."""

    def __init__(self) -> None:
        super().__init__(dim=32, slices=16, depth=2)
        self.embed, self.head = torch.nn.Linear(4, 32), torch.nn.Linear(32, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found, right = self(batch[0]), batch[1]
        for name, own in {"pressure": slice(0, 1), "velocity": slice(1, 4)}.items():
            missed = (found[..., own] - right[..., own]).square().sum((1, 2))
            self.log(name, (missed / right[..., own].square().sum((1, 2))).sqrt().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=3e-3)
        return [adam], [torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS)]


class Storm(Neighbours):
    """Denoises an image; the noise comes with the batch, so that runs can be compared."""

    def __init__(self) -> None:
        super().__init__(dim=8, window=49, depth=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, noise = batch
        loss = F.mse_loss(self(image + 0.5 * noise), noise)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            print(f"loss {float(self.trainer.callback_metrics['loss']):.15g}", flush=True)


def transolver(ranks: int) -> None:
    """Train at 512 points a rank, and print the errors."""
    split = {"sequence_dim": {"0": 1, "1": 1}, "strategies": "sequence", "model_parallel_size": ranks}
    trainer = Trainer(
        **QUIET,
        max_epochs=EPOCHS,
        check_val_every_n_epoch=EPOCHS,
        num_sanity_val_steps=0,
        devices=ranks,
        strategy=AMPStrategy(**split) if ranks > 1 else "auto",
        use_distributed_sampler=False,
    )
    train, test = (spheres(n, 512 * ranks, seed) for n, seed in ((64, 1), (32, 2)))
    draw = torch.Generator().manual_seed(0)
    trainer.fit(Flow(), DataLoader(train, 8, shuffle=True, generator=draw), DataLoader(test, 8))
    if trainer.is_global_zero:
        errors = [float(trainer.callback_metrics[name]) for name in ("pressure", "velocity")]
        print(f"| {ranks} | {512 * ranks:,} | {errors[0]:.3f} | {errors[1]:.3f} |", flush=True)


def storm(domain: int) -> None:
    """Ten steps on 2 data ranks, each with as many domain ranks."""
    draw = torch.Generator().manual_seed(1)
    image = torch.randn(20, 3, 64, 16, generator=draw).cumsum(2).double() / 4
    noise = torch.randn(image.shape, generator=draw).double()
    split = {"sequence_dim": {"0": 2, "1": 2}, "strategies": "S1,sequence", "model_parallel_size": domain}
    trainer = Trainer(
        **QUIET,
        max_epochs=1,
        devices=2 * domain,
        strategy=AMPStrategy(**split) if domain > 1 else AMPStrategy(strategies="S1"),
    )
    trainer.fit(Storm().double(), DataLoader(TensorDataset(image, noise), 1))


def main() -> None:
    """Run what is named; each run in a process, whose launcher starts the other ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("transolver", "storm"))
    parser.add_argument("--ranks", type=int)
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if asked.ranks is not None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        seed_everything(0, verbose=False)
        {"transolver": transolver, "storm": storm}[asked.what](asked.ranks)
        return
    command = [sys.executable, "-m", "benchmarks.domain.training", asked.what, "--ranks"]
    if asked.what == "transolver":
        print("| ranks | points | pressure | velocity |\n|---|---|---|---|", flush=True)
    losses = []
    for ranks in (1, 2, 4) if asked.what == "transolver" else (1, 2):
        done = subprocess.run([*command, str(ranks)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = done.stdout.splitlines()
        print(*[line for line in lines if line.startswith("| ")], sep="\n", end="\n" * (asked.what == "transolver"))
        losses.append([float(line.split()[1]) for line in lines if line.startswith("loss ")])
    if asked.what == "storm":
        apart = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
        print(
            f"{len(losses[0])} steps, loss from {losses[0][0]:.4f} to {losses[0][-1]:.4f};"
            f" 2 x 2 ranks differ by {apart:.0e}"
        )


if __name__ == "__main__":
    main()
