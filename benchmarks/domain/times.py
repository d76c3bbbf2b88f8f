"""Time a step of which every sample is split over two ranks, each with one thread, against one process with one thread.

    python -m benchmarks.domain.times [--rounds 5]

In every round one rank takes a plain step, then a step through the dispatcher with nothing split, then both ranks take
one with the sample split; medians of the ratios within rounds, in one run. Forward, backward and averaging of
gradients. A machine with two free cores is required.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.domain.models import GPT, Points, UNet
from benchmarks.models import Net, ViT
from lightning_amp.sharding.splits import MeshAxis
from lightning_amp.techniques.sequence.install import install
from lightning_amp.techniques.sequence.row import SequenceParallel


class Timed(NamedTuple):
    """A module, its batch, the dim that is split, and the sizes of the parts."""

    make: Callable[[], Net]
    batch: Callable[[], Tensor]
    dims: str
    sizes: str = "even"


CASES = {
    "GPT, 16,384 tokens": Timed(lambda: GPT(16384), lambda: torch.randint(256, (1, 16384)), "batch:1", "causal"),
    "ViT, 384 x 384": Timed(lambda: ViT(384), lambda: torch.randn(1, 3, 384, 384), "batch:2"),
    "U-Net, 512 x 512": Timed(UNet, lambda: torch.randn(1, 3, 512, 512), "batch:2"),
    "Transolver, 65,536 points": Timed(Points, lambda: torch.randn(1, 65536, 3), "batch:1"),
}


def _seconds(module: Net, batch: Tensor, axis: MeshAxis | None) -> float:
    module.zero_grad()
    began = time.perf_counter()
    module.training_step(batch, 0).backward()
    if axis is not None and axis.size > 1:
        flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        dist.all_reduce(flat, group=axis.group)
    return time.perf_counter() - began


def _on_rank(rank: int, world: int, folder: str, rounds: int, only: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    both, alone = (MeshAxis("model", world, rank, dist.group.WORLD), MeshAxis("model", 1, 0, dist.new_group([0])))
    if rank == 0:
        print("| one sample | plain step | through the dispatcher | speed of 2 ranks |\n|---|---|---|---|")
    for name, case in ((name, case) for name, case in CASES.items() if only in name):
        torch.manual_seed(0)
        batch, modules = case.batch(), [case.make() for _ in range(3)]
        for module, axis in zip(modules[1:], (alone, both), strict=True):
            sizes = case.sizes if axis is both else "even"
            vars(module).update(install(module, SequenceParallel(dims=case.dims, sizes=sizes), axis))
        took: list[list[float]] = [[], [], []]
        for _ in range(rounds + 1):
            for place, (module, axis) in enumerate(zip(modules, (None, alone, both), strict=True)):
                dist.barrier()
                if rank == 0 or axis is both:
                    took[place].append(_seconds(module, batch, axis))
        if rank == 0:
            # the first round finds plans and warms caches
            plain, through, two = (one[1:] for one in took)
            overhead = median(b / a - 1 for a, b in zip(plain, through, strict=True))
            faster = median(a / b for a, b in zip(plain, two, strict=True))
            print(f"| {name} | {median(plain):.2f} s | {overhead:+.0%} | {faster:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks; rank 0 prints a table for the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_on_rank, (2, folder, asked.rounds, asked.only), 2, start_method="spawn")


if __name__ == "__main__":
    main()
