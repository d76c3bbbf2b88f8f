"""Two nodes on one machine: two torchrun agents, one CPU rank each, and a model axis across them.

    python examples/two_nodes.py

Plans keep the model axis inside a node; `model_parallel_size=2` asks for one that crosses them. On real machines the
agents are started by `examples/train_torchrun.sh`, once on every node.
"""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning.pytorch import Trainer

import lightning_amp
from lightning_amp.data.prepare.synthetic import synthesize


def train(data: Path) -> None:
    """What each of the ranks runs."""
    strategy = lightning_amp.AMPStrategy(strategies="S1,S5", model_parallel_size=2)
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=2,
        devices=1,
        max_epochs=1,
        limit_val_batches=0,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(lightning_amp.GLUE(latent_dim=8, window=8), lightning_amp.SingleCellDataModule(data, batch_size=8))


def start() -> int:
    """Make data, start an agent for each node, and wait."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(data, cells=40, rna_cells=30, bins=40, strata=4, genes=30)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        agents = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                    *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port),
                    *(__file__, str(data)),
                ]
            )
            for node in range(2)
        ]
        return max(agent.wait() for agent in agents)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        raise SystemExit(start())
