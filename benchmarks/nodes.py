"""Two "nodes" on this machine: network namespaces joined by a link of a limited rate, ranks in them, steps of a fit.

Requires root, and `ip` and `tc` of iproute2. `tc` limits the rate in both directions by a token bucket; no delay is
added.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from benchmarks.page import ROOT
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy

NAMESPACES, LINKS = ("amp-node-0", "amp-node-1"), ("amp-veth-0", "amp-veth-1")
ADDRESSES, PORT = ("10.231.7.1", "10.231.7.2"), 29_731
BURST = 32 * 1024
"""Bytes that may pass at once."""


def refuse_without_root() -> None:
    """Say what is needed.

    Raises:
        SystemExit: The user is not root, or a program is not there.
    """
    if os.geteuid() != 0:
        raise SystemExit(
            f"network namespaces and shaped links need root, found user {os.geteuid()!r}: run this command by sudo"
        )
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise SystemExit(f"shaped links need the program {program!r} (iproute2), which is not there: install it")


def call(*words: object) -> None:
    """Run a program that has to succeed."""
    subprocess.run([str(word) for word in words], check=True)


@contextmanager
def linked(mbit: int, within_mbit: int = 0) -> Iterator[None]:
    """Two namespaces with a link of this rate between them; their loopbacks are limited too if `within_mbit` is set.

    Raises:
        SystemExit: As `refuse_without_root`, or this machine makes no namespaces.
    """
    refuse_without_root()
    made = list[str]()
    try:
        try:
            for name in NAMESPACES:
                call("ip", "netns", "add", name)
                made.append(name)
            first, second = NAMESPACES
            call("ip", "link", "add", LINKS[0], "netns", first, "type", "veth", "peer", LINKS[1], "netns", second)
            for name, link, address in zip(NAMESPACES, LINKS, ADDRESSES, strict=True):
                inside = ("ip", "netns", "exec", name)
                call(*inside, "ip", "addr", "add", f"{address}/24", "dev", link)
                for one in (link, "lo"):
                    call(*inside, "ip", "link", "set", one, "up")
                call(*inside, *limit_words(link, mbit, BURST))
                if within_mbit:
                    call(*inside, *limit_words("lo", within_mbit, 4 * BURST))
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"this machine makes no shaped link: {' '.join(error.cmd)!r} failed") from error
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def limit_words(link: str, mbit: int | None, burst: int) -> list[object]:
    """The command that limits what a link sends, or does so no more."""
    kind = ["pfifo", "limit", 1000] if mbit is None else ["tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", "1s"]
    return ["tc", "qdisc", "replace", "dev", link, "root", *kind]


def limit_from_inside(mbit: int | None) -> None:
    """Limit what the node of this rank sends; a collective of all ranks."""
    dist.barrier()
    if int(os.environ["LOCAL_RANK"]) == 0:
        call(*limit_words(os.environ["GLOO_SOCKET_IFNAME"], mbit, BURST))
    dist.barrier()


def on_nodes(module: str, words: Sequence[str], ranks: int = 2, per_node: int = 1) -> Any:
    """Run `python -m MODULE WORDS` as all ranks, so many in each namespace; the line of JSON that rank 0 prints last.

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
    return json.loads(lines[-1])


class Clock(Callback):
    """The time at the end of every step."""

    def __init__(self) -> None:
        self.ends = list[float]()

    def on_train_batch_end(self, *args: Any) -> None:
        """A step has ended."""
        self.ends.append(time.perf_counter())


def step_seconds(strategy: AMPStrategy, module: LightningModule, batches: Sequence[Any], *, skipped: int = 2) -> float:
    """Median seconds of a step of a fit on the ranks that `on_nodes` has started, without the first ones."""
    clock, per_node = Clock(), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        **QUIET,
        strategy=strategy,
        devices=per_node,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_node,
        accelerator="cpu",
        max_epochs=1,
        plugins=[TorchElasticEnvironment()],
        callbacks=[clock],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return median(b - a for a, b in pairwise(clock.ends[skipped - 1 :]))
