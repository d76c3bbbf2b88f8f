"""Train a transformer block on 2 and 4 CPU ranks by tensor3d and by others: bytes held and sent, seconds, differences.

    python -m benchmarks.tensor3d.peers run            (two minutes)
    python -m benchmarks.tensor3d.peers odd            (one minute)
    python -m benchmarks.tensor3d.peers autoparallel   (one minute; meta-pytorch/autoparallel has to be installed)

run: torch's `parallelize_module` (columns, then rows: Megatron's plan) and `fully_shard` beside grids, in one run;
bytes are those that a rank of a ring sends: 2 (n - 1) / n of an all-reduce's tensor, (n - 1) / n of what is gathered or
scattered. odd: what `parallelize_module` makes of modules whose features are not apart; differences are the largest of
a parameter after three steps. autoparallel: its plan of the same block on a mesh of 2 x 2 with a fake process group, a
rank holding a quarter of the parameters, beside ours, both counted; it expects a GPU, whose name is given to it.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from benchmarks.models import Net
from benchmarks.tensor3d.bytes import sent_by
from benchmarks.tensor3d.ranks import Ranks
from benchmarks.tensor3d.small import QUIET
from lightning_amp import AMPStrategy
from tests.lightning.strategy.strategy_cases import RunningRanks

ROWS, LENGTH, WIDTH, HEADS, STEPS = 8, 128, 256, 8, 6
Grid = tuple[int, int, int]
COLUMNS, LINES = ColwiseParallel(), RowwiseParallel()


class Block(Net):
    """Attention and an MLP, with q, k and v apart and the products written by hand."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, places, width] -> the same."""
        d = x.shape[-1] // self.heads
        q, k, v = (one(x).unflatten(-1, (-1, d)).transpose(1, 2) for one in (self.q, self.k, self.v))
        found = (q @ k.mT / d**0.5).softmax(-1) @ v
        x = x + self.o(found.transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(x)))

    def loss(self, batch: Tensor) -> Tensor:
        """Squares."""
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        """Plain descent, which shows a gradient of the wrong size."""
        return torch.optim.SGD(self.parameters(), 0.1)


class Gated(Block):
    """A gated MLP whose halves are chunks of one layer."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        self.both, self.last = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 8] -> [..., 8]."""
        gate, value = self.both(x).chunk(2, -1)
        return self.last(F.silu(gate) * value)


class Fused(Block):
    """q, k and v are one layer, by literals of a view."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        self.qkv, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, places, 8] -> the same."""
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 8))


MEGATRON: dict[str, Any] = {**dict.fromkeys(("q", "k", "v", "up"), COLUMNS), **dict.fromkeys(("o", "down"), LINES)}
ODD: dict[str, tuple[Callable[[], Block], dict[str, Any], tuple[int, ...]]] = {
    "a gated layer, by chunk": (Gated, {"both": COLUMNS, "last": LINES}, (4, 8)),
    "q, k and v in one layer": (Fused, {"qkv": COLUMNS, "last": LINES}, (4, 5, 8)),
    "3 heads on 2 ranks": (lambda: Block(12, 3), MEGATRON, (4, 5, 12)),
    "5 heads of odd width on 2 ranks": (lambda: Block(15, 5), MEGATRON, (4, 5, 15)),
}


class Sending(TorchDispatchMode):
    """Counts the bytes that this rank of a ring sends."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at collectives."""
        name = getattr(func, "_opname", "")
        if func.namespace == "c10d":
            pgs = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            n = dist.ProcessGroup.unbox(pgs[0]).size() if pgs else 1
            given = {"allreduce_": lambda: args[0], "alltoall_base_": lambda: [args[1]], "alltoall_": lambda: args[1]}
            given |= {"_allgather_base_": lambda: [args[1]], "_reduce_scatter_base_": lambda: [args[1]]}
            if name in given:
                self.total += ring(name, sum(t.nbytes for t in given[name]()), n)
        elif func.namespace == "_c10d_functional" and isinstance(args[-1], str):
            n = dist.distributed_c10d._resolve_process_group(args[-1]).size()
            self.total += ring(name, args[0].nbytes, n)
        return func(*args, **(kwargs or {}))


def ring(kind: str, n_bytes: float, n: int) -> float:
    """Bytes that a rank of a ring of n sends, by what it puts into a collective."""
    if "gather" in kind:
        return n_bytes * (n - 1)
    return (2 if "reduce" in kind and "scatter" not in kind else 1) * n_bytes * (n - 1) / n


class Timer(Callback):
    """Seconds of each step, with the bytes that a rank sends in the last one."""

    def __init__(self) -> None:
        self.took, self.held = list[float](), 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == STEPS - 1:
            self.mode = Sending()
            self.mode.__enter__()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        self.took.append(time.perf_counter() - self.began)
        self.held = sum(p.nbytes for p in module.parameters())
        if batch_idx == STEPS - 1:
            self.mode.__exit__(None, None, None)


class Done(NamedTuple):
    """Parameters after the last step, bytes held of them, bytes sent and seconds of a step."""

    state: list[Tensor]
    held: int
    sent: float
    seconds: float


def on_rank(rank: int, ranks: int, make: str, how: str, grid: Grid | None, shape: tuple[int, ...]) -> Done:
    """Train on one rank."""
    torch.manual_seed(0)
    kind, plan, _ = ODD.get(make, (Block, MEGATRON, ()))
    module = kind().double()
    batches = [torch.randn(shape).double() for _ in range(STEPS)]
    split = ranks if how == "fully_shard" else ranks // (grid[0] * grid[1]) if grid else 1
    rows = shape[0] // split
    place = rank if how == "fully_shard" else rank // (grid[0] * grid[1]) if grid else 0
    mine = [b[place * rows :][:rows] for b in batches]
    if how == "tensor3d" or ranks == 1:
        timer = Timer()
        given: dict[str, Any] = {"devices": 1}
        if ranks > 1:
            strategy = AMPStrategy(strategies="tensor3d", tensor_grid=grid)
            given = {"strategy": strategy, "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
        Trainer(**QUIET, **given, callbacks=[timer]).fit(module, DataLoader(mine, batch_size=None))  # type: ignore[arg-type]
        sent = timer.mode.total
        return Done([p.detach() for p in module.parameters()], timer.held, sent, median(timer.took[1:]))
    mesh = init_device_mesh("cpu", (ranks,))
    module = module.to(torch.float64)
    if how == "fully_shard":
        fully_shard(module, mesh=mesh)
    else:
        parallelize_module(module, mesh, plan)
    optimizer, took, mode = module.configure_optimizers(), list[float](), Sending()
    for i, batch in enumerate(mine):
        began = time.perf_counter()
        optimizer.zero_grad()
        with mode if i == STEPS - 1 else Sending():
            # of a LightningModule outside of a Trainer, hooks of `forward` are run
            module(batch).square().mean().backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return Done([p.detach() for p in whole], sum(p.nbytes for p in local), mode.total, median(took[1:]))


def apart(found: list[Done], right: Done) -> float:
    """The largest difference of a parameter on any rank."""
    pairs = [pair for one in found for pair in zip(one.state, right.state, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def run() -> None:
    """One table for 2 and 4 ranks."""
    shape = (ROWS, LENGTH, WIDTH)
    right = on_rank(0, 1, "", "tensor3d", None, shape)
    whole = sum(p.nbytes for p in right.state)
    print("| ranks | way | parameters held | sent by a rank | a step | differs by |\n|---|---|---|---|---|---|")
    print(f"| 1 | one process | 1.000 | 0 | {right.seconds:.2f} s | |", flush=True)
    for ranks in (2, 4):
        grids: list[Grid] = (
            [(2, 1, 1), (1, 2, 1), (1, 1, 2)] if ranks == 2 else [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 4, 1), (1, 1, 4)]
        )
        pool = Ranks(ranks, on_rank, patience=200)
        ways: list[tuple[str, Grid | None]] = [("parallelize_module", None), ("fully_shard", None)]
        for how, grid in [*(("tensor3d", grid) for grid in grids), *ways]:
            found = pool.results("", how, grid, shape)
            cells = (
                str(ranks),
                how + (f" {' x '.join(map(str, grid))}" if grid else ""),
                f"{max(one.held for one in found) / whole:.3f}",
                f"{found[0].sent / 2**20:.1f} MiB",
                f"{found[0].seconds:.2f} s",
                f"{apart(found, right):.0e}",
            )
            print("|", " | ".join(cells), "|", flush=True)
        pool.end()


def odd() -> None:
    """What others and we make of modules whose features are not apart."""
    print("| module, on 2 ranks | parallelize_module | tensor3d 1 x 2 x 1 |\n|---|---|---|")
    pool = Ranks(2, on_rank, patience=100)
    for name, (_, _, shape) in ODD.items():
        right, cells = on_rank(0, 1, name, "tensor3d", None, shape), [name]
        for how in ("parallelize_module", "tensor3d"):
            found = pool.ask(name, how, (1, 2, 1) if how == "tensor3d" else None, shape)
            done = [value for kind, value in found if kind == "done"]
            if len(done) == 2:
                error = apart(done, right)
                cells.append("exact" if error < 1e-10 else f"wrong by {error:.1g}, in silence")
            else:
                text = next(value for kind, value in found if kind != "done")
                cells.append(f"{found[0][0]}: {text[:110]}".replace("\n", " ").replace("|", "/"))
                pool.end()
                pool = Ranks(2, on_rank, patience=100)
        print("|", " | ".join(cells), "|", flush=True)
    pool.end()


def autoparallel() -> None:
    """Its plan and ours, counted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape = (ROWS, 1024, 2048)
    batch = torch.empty(shape, device="meta")
    with torch.device("meta"):
        module = Block(2048, 16)
    whole = sum(p.nbytes for p in module.parameters())
    print("| way | parameters held | sent by a rank |\n|---|---|---|")
    for grid in [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 4, 1), (4, 1, 1), (1, 1, 4)]:
        rows = batch[: ROWS // grid[2]]
        sent, _ = sent_by(grid, lambda: module, rows)
        total = sum(ring(one.kind, one.n_bytes, one.ranks) for one in sent)
        print(f"| tensor3d {' x '.join(map(str, grid))} | 0.250 | {total / 2**20:.2f} MiB |", flush=True)
    torch.cpu.get_device_name = lambda device=None: "NVIDIA A100-SXM4-40GB"  # type: ignore[attr-defined]
    from autoparallel.api import AutoParallel

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("z", "y"))
    with AutoParallel(module, lambda: torch.rand(shape), mesh) as planner:
        planner.add_parameter_memory_constraint(low=0.0, high=0.2501)
        rows_apart = (Shard(0), Replicate())
        planner.add_input_constraints([rows_apart])
        planner.add_output_constraints([rows_apart])
        planned = planner.apply_placement(planner.optimize_placement())
    graph, total = planner.parallel_gm.graph, 0.0
    for node in graph.nodes:
        if "c10d_functional" in str(node.target) and isinstance(node.args[-1], str):
            n = dist.distributed_c10d._resolve_process_group(node.args[-1]).size()
            total += ring(str(node.target), node.args[0].meta["val"].nbytes, n)
    own = sum(p.to_local().nbytes for p in planned.parameters())
    print(f"| autoparallel on 2 x 2 | {own / whole:.3f} | {total / 2**20:.2f} MiB |")


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "odd", "autoparallel"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if asked.what == "autoparallel":
        try:
            import autoparallel as _  # noqa: F401
        except ImportError as error:
            sys.exit(f"meta-pytorch/autoparallel is not installed: {error}")
    {"run": run, "odd": odd, "autoparallel": autoparallel}[asked.what]()


if __name__ == "__main__":
    main()
