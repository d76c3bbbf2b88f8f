"""Train small modules on 1 to 4 ranks with every sample split, and compare with one process in float64.

    python -m benchmarks.domain.exactness [--ranks 1 2 3 4] [--only NAME]

Modules x ranks x even, uneven and causal sizes x batches of 1 and 3 samples: the loss and all gradients of three steps,
and the parameters after three steps of Adam. Processes on this machine, connected by gloo.
"""

import argparse
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.domain.models import GPT, Neighbours, Points, Translate, UNet
from benchmarks.models import Net, ViT
from lightning_amp.sharding.splits import MeshAxis
from lightning_amp.techniques.sequence.install import install
from lightning_amp.techniques.sequence.row import SequenceParallel

SIZES = ("even", "uneven", "causal")
ROWS = (1, 3)
STEPS = 3
BOUND = 1e-10


class Small(NamedTuple):
    """A module, its batch of so many samples, the dims that are split and the length of each."""

    make: Callable[[], Net]
    batch: Callable[[int], Any]
    dims: str
    length: int


def _words(*shape: int) -> Tensor:
    return torch.randint(32, shape)


MODULES = {
    "GPT": Small(lambda: GPT(13, 8, 2, 32), lambda b: _words(b, 13), "batch:1", 13),
    "ViT 2D": Small(lambda: ViT(20, 8, 2), lambda b: torch.randn(b, 3, 20, 20), "batch:2", 20),
    "ViT 3D": Small(lambda: ViT(16, 8, 1, 4, 3), lambda b: torch.randn(b, 3, 16, 16, 16), "batch:2", 16),
    "U-Net 2D": Small(lambda: UNet(4), lambda b: torch.randn(b, 3, 16, 12), "batch:2", 16),
    "U-Net 3D": Small(lambda: UNet(4, 3), lambda b: torch.randn(b, 3, 16, 8, 4), "batch:2", 16),
    "Transolver": Small(lambda: Points(8, 4, 2), lambda b: torch.randn(b, 29, 3), "batch:1", 29),
    "neighbourhood attention": Small(lambda: Neighbours(8), lambda b: torch.randn(b, 3, 17, 9), "batch:2", 17),
    "encoder-decoder": Small(
        Translate, lambda b: {"source": _words(b, 15), "target": _words(b, 15)}, "source:1,target:1", 15
    ),
}


def sizes_of(how: str, length: int, ranks: int) -> str:
    """As a rule of `sequence` has them; uneven ones are at least 1, drawn by length and ranks."""
    if how != "uneven":
        return how
    draw = random.Random(f"{length} {ranks}")
    ends = sorted(draw.sample(range(1, length), ranks - 1))
    return ",".join(str(b - a) for a, b in zip([0, *ends], [*ends, length], strict=True))


def trained(case: Small, rows: int, sizes: str = "", axis: MeshAxis | None = None) -> list[Tensor]:
    """Losses and gradients of three steps, and the parameters after them; without an axis as one process has them."""
    torch.manual_seed(rows)
    module = case.make().double()
    batches = [_double(case.batch(rows)) for _ in range(STEPS)]
    if axis is not None:
        vars(module).update(install(module, SequenceParallel(dims=case.dims, sizes=sizes), axis))
    adam, found = torch.optim.Adam(module.parameters()), list[Tensor]()
    for batch in batches:
        adam.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        found.append(loss.detach())
        for parameter in module.parameters():
            assert parameter.grad is not None, "every parameter is used"
            if axis is not None:
                dist.all_reduce(parameter.grad, group=axis.group)
                parameter.grad /= axis.size
            found.append(parameter.grad.clone())
        adam.step()
    return [*found, *(p.detach().clone() for p in module.parameters())]


def _double(batch: Any) -> Any:
    if isinstance(batch, dict):
        return batch
    return batch.double() if batch.is_floating_point() else batch


def apart(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference, of a tensor's largest entry where that is above 1."""
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(found, right, strict=True))


def combinations(only: str, ranks: list[int]) -> Iterator[tuple[str, int, str, int]]:
    """Names, ranks, sizes and samples."""
    for name in MODULES:
        if only in name:
            yield from ((name, n, how, rows) for rows in ROWS for n in ranks for how in SIZES)


def _on_rank(rank: int, world: int, folder: str, only: str, ranks: list[int]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    axes = {n: MeshAxis("model", n, rank, dist.new_group([*range(n)])) for n in ranks}
    right, worst, failed, began = dict[Any, Any](), dict[Any, float](), 0, time.monotonic()
    for name, n, how, rows in combinations(only, ranks):
        case = MODULES[name]
        if (name, rows) not in right:
            right[name, rows] = trained(case, rows)
        if rank < n:
            sizes = sizes_of(how, case.length, n)
            error = apart(trained(case, rows, sizes, axes[n]), right[name, rows])
            worst[name, n] = max(worst.get((name, n), 0.0), error)
            failed += error > BOUND
            if rank == 0 and error > BOUND:
                print(f"{name}, {n} ranks, {how} ({sizes}), {rows} samples: differs by {error:.1e}", flush=True)
        dist.barrier()
    if rank == 0:
        print("| module | " + " | ".join(f"{n} ranks" if n > 1 else "1 rank" for n in ranks) + " |")
        print("|---" * (len(ranks) + 1) + "|")
        for name in dict.fromkeys(name for name, _ in worst):
            print(f"| {name} | " + " | ".join(f"{worst[name, n]:.0e}" for n in ranks) + " |")
        total = len([*combinations(only, ranks)])
        print(f"\n{total} runs, {failed} beyond {BOUND:.0e}, {time.monotonic() - began:.0f} s")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks; rank 0 prints a table for the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        world = max(asked.ranks)
        mp.start_processes(_on_rank, (world, folder, asked.only, asked.ranks), world, start_method="spawn")


if __name__ == "__main__":
    main()
