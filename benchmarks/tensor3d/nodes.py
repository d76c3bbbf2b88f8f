"""Start ranks on the two "nodes" of a shaped link, and time the steps of a fit on them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from benchmarks.page import ROOT
from benchmarks.pipeline.shaped_links import ADDRESSES, LINKS, NAMESPACES, PORT
from benchmarks.training.whole_step import QUIET
from lightning_amp.lightning.strategy.strategy import AMPStrategy


class Watch(Callback):
    """The time at the end of every step."""

    def __init__(self) -> None:
        self.ends = list[float]()

    def on_train_batch_end(self, *args: Any) -> None:
        """A step has ended."""
        self.ends.append(time.perf_counter())


def step_seconds(
    strategy: AMPStrategy, module: LightningModule, batches: Sequence[Any], *, skipped: int
) -> float:
    """Median seconds of a step of a fit on the ranks that `on_nodes` has started, after the first ones."""
    watch, per_node = Watch(), int(os.environ["LOCAL_WORLD_SIZE"])
    options: dict[str, Any] = {
        "devices": per_node,
        "num_nodes": int(os.environ["WORLD_SIZE"]) // per_node,
        "accelerator": "cpu",
        **QUIET,
    }
    Trainer(
        strategy=strategy,
        max_epochs=1,
        plugins=[TorchElasticEnvironment()],
        callbacks=[watch],
        use_distributed_sampler=False,
        **options,
    ).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return median(b - a for a, b in pairwise(watch.ends[skipped - 1 :]))


def on_nodes(module: str, words: Sequence[str], ranks: int, per_node: int) -> dict[str, Any]:
    """Run `python -m MODULE WORDS` as all ranks, so many in each namespace; the line of JSON that rank 0 prints.

    Raises:
        SystemExit: A rank was lost.
    """
    paths, started = os.pathsep.join([str(ROOT), *sys.path]), []
    for rank in range(ranks):
        node = rank // per_node
        environment = os.environ | {
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": LINKS[node]},
            **{"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "GROUP_RANK": str(node)},
            **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_node)},
            **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "TORCHELASTIC_RUN_ID": "amp"},
        }
        command = ["ip", "netns", "exec", NAMESPACES[node], sys.executable, "-m", module, *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
    said = [rank.communicate()[0] for rank in started]
    lines = [line for line in said[0].splitlines() if line.startswith('{"')]
    if any(rank.returncode for rank in started) or not lines:
        raise SystemExit("\n".join(one[-3000:] for one in said))
    found: dict[str, Any] = json.loads(lines[-1])
    return found
