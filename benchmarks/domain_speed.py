"""Forward and backward pass of a decoder on two ranks that share its anchors, against the same on one rank.

    python -m benchmarks.domain_speed

Every rank has one thread. Steps of one rank and of two alternate in one run, and the ratio is that of the medians. The
column `cpu` has seconds of the processor that the first rank used for itself: on a machine that others use too, its
ratio still says how the work is shared. Takes about a minute.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.parallel.describe_module import describe
from lightning_amp.parallel.install import install
from lightning_amp.parallel.s1_data.gradient_sync import GradientSync
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.policies.make_plan import plan

ANCHORS, WINDOW, STRATA, DIM, CELLS = 6400, 320, 4, 128, 16
ALONE, SHARED = "S1,S4,fused,stream", "S1,S4,fused,nodes,stream"
REPEATS = 7
TARGET = 1.8


def main() -> None:
    """Print both medians and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    steps = {"one rank": _step(ALONE, None), "two ranks": _step(SHARED, mesh)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(REPEATS + 1):
        for name, step in steps.items():
            dist.barrier()
            if rank == 0 or name == "two ranks":
                seconds[name].append(_timed(step))
    if rank == 0:
        _report({name: rows[1:] for name, rows in seconds.items()})
    dist.destroy_process_group()


def _step(strategies: str, mesh: DeviceMesh | None) -> Callable[[], None]:
    """A forward and a backward pass, and the sum of the gradients' parts."""
    torch.manual_seed(0)
    decoder = StratifiedDecoder(
        DIM,
        [range(ANCHORS - k) for k in range(STRATA)],
        stratum_index=range(STRATA),
        n_anchors=ANCHORS,
        n_batches=1,
        window=WINDOW,
    )
    u, v = torch.randn(CELLS, DIM, requires_grad=True), torch.randn(ANCHORS, DIM, requires_grad=True)
    x = torch.poisson(torch.full((CELLS, decoder.n_features), 0.05))
    cells: dict[str, Tensor] = {
        "x": x,
        "library": x.sum(1, keepdim=True) + 1,
        "batch": torch.zeros(CELLS, dtype=torch.int64),
    }
    module = torch.nn.Module()
    module.decoder = decoder
    ranks = 1 if mesh is None else mesh.size()
    shape = describe(module, batch_size=CELLS)
    made = plan(profile_of_module(shape), devices=ranks, strategies=strategies, batch_size=CELLS, shape=shape)
    installed = install(module, made, mesh)
    sync = None if mesh is None else GradientSync(module.parameters(), mesh, partial=installed.partial)

    def step() -> None:
        module.zero_grad()
        if sync is not None:
            sync.watch()
        decoder(u, v, **cells).backward()
        if sync is not None:
            sync.reduce()

    return step


def _report(seconds: dict[str, list[tuple[float, float]]]) -> None:
    medians = {
        name: [statistics.median(c) for c in zip(*rows, strict=True)] for name, rows in seconds.items()
    }
    print(f"N {ANCHORS:,}, w {WINDOW}, K {STRATA}, D {DIM}, B {CELLS}; medians of {REPEATS} steps")
    print(f"{'':<10} {'s':>7} {'cpu':>7}")
    for name, (wall, cpu) in medians.items():
        print(f"{name:<10} {wall:>7.3f} {cpu:>7.3f}")
    ratios = [a / b for a, b in zip(*medians.values(), strict=True)]
    print(
        f"{'ratio':<10} {ratios[0]:>7.2f} {ratios[1]:>7.2f}   target {TARGET}, reached {ratios[0] >= TARGET}"
    )


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    start = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start[0], time.process_time() - start[1]


if __name__ == "__main__":
    main()
