"""The reference model on several nodes: a script for torchrun, and a function for ranks with SLURM's environment."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.glue import GLUE

GLOBAL_BATCH = 12


def train(data_dir: Path, out: Path, *, nodes: int, devices: int, settings: dict[str, Any]) -> None:
    """Train a few steps; every rank writes what it has seen."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    seed_everything(3)
    strategy = AMPStrategy(**settings)
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        num_nodes=nodes,
        devices=devices,
        max_epochs=1,
        limit_val_batches=0,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GLUE(latent_dim=8, hidden_dim=16, window=8, edges_per_step=64, align_burnin=2)
    data_ranks = nodes * devices // settings.get("model_parallel_size", min(devices, 2))
    data = SingleCellDataModule(data_dir, batch_size=GLOBAL_BATCH // data_ranks, val_fraction=0.0)
    trainer.fit(model, data)
    plan = strategy.plan
    assert plan is not None, "there is a plan after a fit"
    seen = {
        "environment": type(strategy.cluster_environment).__name__,
        "node": trainer.node_rank,
        "mesh": [plan.mesh.data, plan.mesh.model],
        "notes": list(map(str, plan.notes)),
        "steps": trainer.global_step,
        "state": model.state_dict(),
    }
    torch.save(seen, out / f"rank{trainer.global_rank}.pt")


def serve_slurm(rank: int, port: int, data_dir: Path, out: Path, nodes: int, settings: dict[str, Any]) -> None:
    """A task of a SLURM job with two tasks a node, without SLURM; one node is no job."""
    log = (out / f"rank{rank}.txt").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    devices = 1 if nodes == 1 else 2
    if nodes > 1:
        os.environ.update(
            SLURM_JOB_ID="1",
            SLURM_JOB_NAME="train",
            SLURM_NTASKS=str(nodes * devices),
            SLURM_NTASKS_PER_NODE=str(devices),
            SLURM_NNODES=str(nodes),
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank % devices),
            SLURM_NODEID=str(rank // devices),
            SLURM_NODELIST="localhost",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    train(data_dir, out, nodes=nodes, devices=devices, settings=settings)


if __name__ == "__main__":
    train(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        nodes=int(sys.argv[3]),
        devices=int(sys.argv[4]),
        settings=json.loads(sys.argv[5]),
    )
