"""Compare what a rank sends with Equations 4 to 8 of the AxoNN paper, layer by layer, and what it holds with 1 / ranks.

    python -m benchmarks.tensor3d.bytes [--held]

Counted: a GPT block's linear layers in a dry run, whose list of collectives is compared with the equations. The roles
of the layers are found, not set. The equations have, for a weight of K x N and M rows of the input in a rank:

    4  all-gather over z     K N / (x y z)      of the weight, forward; and again where the backward pass needs it
    5  reduce-scatter over z K N / (x y)        of its gradient
    6  all-reduce            M N / y over x     of the output ("transposed" layers swap x and y)
    7  all-reduce            M K / x over y     of the input's gradient; here it stands at the output of the layer
                                                before, and that of the first layer at the output of the last one
    8  all-reduce over data  K N / (x y z)      of the gradient

With --held processes are started: parameters, gradients and Adam's state of each rank against the whole divided by the
ranks, and the predicted peak against that of a meter. Two minutes, with --held four.
"""

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.models import GPT, Net, UNet
from benchmarks.tensor3d.models import MLP
from benchmarks.tensor3d.ranks import Ranks
from benchmarks.tensor3d.small import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.sharding.splits import Sent
from lightning_amp.techniques.tensor3d import units
from lightning_amp.techniques.tensor3d.row import TensorParallel3D
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import RunningRanks

Grid = tuple[int, int, int]
GRIDS: list[Grid] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (4, 2, 1), (2, 4, 2)]
ROWS, WIDTH, BYTES = 24, 64, 4


class Layers(Net):
    """The four linear layers of a GPT block in a row, without bias."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for k, n in sizes)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean of squares."""
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch.square().mean()


def sent_by(grid: Grid, make: Any = Layers, batch: Any = None) -> tuple[list[Sent], TensorParallel3D]:
    """The collectives of a rank in one step, and the layouts."""
    batch = torch.randn(ROWS, WIDTH) if batch is None else batch
    spec = TensorParallel3D(grid="x".join(map(str, grid)))
    steps = DrySteps("tensor3d", spec, grid[0] * grid[1] * grid[2], chosen=False)
    StepOfModule(make(), lambda: batch, run_settings=BY_ITSELF, steps=steps).profiled(CPU_CORE)
    return list(steps.sent), steps.spec


def equations(grid: Grid, layouts: str) -> Counter[str]:
    """Bytes of Eq. 4 to 7 by kind, by the roles that the layers have."""
    x, y, z = grid
    roles, found = json.loads(layouts), Counter[str]()
    for i, layer in enumerate(Layers().layers):
        n, k = layer.weight.shape  # type: ignore[misc]
        axes = {dim: axis for axis, (dim, _) in roles.get(f"layers.{i}.weight", {}).items()}
        inner, out = ({"x": x, "y": y}.get(axes.get(dim, ""), 1) for dim in (1, 0))
        block = k * n // (inner * out)  # type: ignore[operator]
        if z > 1:
            # again in the backward pass, for which nothing is kept, where an input's gradient is needed
            found["4 all-gather"] += (2 if i else 1) * block // z * BYTES
            found["5 reduce-scatter"] += block * BYTES
        if inner > 1:
            found["6 all-reduce, forward"] += ROWS * n // out * BYTES  # type: ignore[operator]
        if out > 1:
            found["7 all-reduce, backward"] += ROWS * k // inner * BYTES  # type: ignore[operator]
    return found


NAMES = {"all_gather": "4 all-gather", "reduce_scatter": "5 reduce-scatter"}


def compared() -> int:
    """Print the bytes of each grid by the equations and by the dry run; returns how many differ."""
    print("| grid | equation | its bytes | dry run |\n|---|---|---|---|")
    wrong = 0
    for grid in GRIDS:
        sent, spec = sent_by(grid)
        own = Counter[str]()
        for one in sent:
            both = "7 all-reduce, backward" if one.backward else "6 all-reduce, forward"
            # the loss is a mean over all features
            if one.n_bytes > BYTES:
                own[NAMES.get(one.kind, both)] += one.n_bytes
        right = equations(grid, spec.layouts)
        wrong += right != own
        for kind in sorted(right | own):
            print(f"| {' x '.join(map(str, grid))} | {kind} | {right[kind]:,} | {own[kind]:,} |", flush=True)
    return wrong


class Held(Callback):
    """Bytes of this rank after a step, and of all that is averaged over copies of the grid."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Count them."""
        self.parameters = sum(p.nbytes for p in module.parameters())
        states = [state for opt in trainer.optimizers for state in opt.state.values()]
        self.adam = sum(state[key].nbytes for state in states for key in ("exp_avg", "exp_avg_sq"))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Count gradients."""
        self.gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)


MODELS: dict[str, tuple[Callable[[], Net], Callable[[], Tensor]]] = {
    "GPT": (lambda: GPT(64, 4, 2, 256, 16), lambda: torch.randint(256, (8, 17))),
    "GPT-2, tied head, 3 heads": (lambda: GPT(48, 3, 2, 301, 16, tied=True), lambda: torch.randint(301, (8, 17))),
    "U-Net, group norm": (lambda: UNet(16), lambda: torch.randn(8, 6, 12, 16)),
    "wide MLP": (lambda: MLP(301, 203, 50), lambda: torch.randn(8, 301)),
}


def held(rank: int, ranks: int, name: str, grid: Grid) -> dict[str, float]:
    """What one rank holds after three steps, its peak, and what it averages over copies."""
    averaged = list[int]()
    own = units.average
    units.average = lambda grads, axis: (averaged.append(sum(g.nbytes for g in grads)), own(grads, axis))[1]
    seed_everything(1, verbose=False)
    make, batch = MODELS[name]
    rows = slice(None, 8 * grid[0] * grid[1] // ranks)
    seen, meter = Held(), Meter()
    strategy = AMPStrategy(strategies="tensor3d", tensor_grid=grid)
    trainer = Trainer(
        **QUIET, strategy=strategy, devices=ranks, plugins=[RunningRanks(rank, ranks)], callbacks=[seen, meter]
    )
    module = make()
    trainer.fit(module, DataLoader([batch()[rows] for _ in range(3)], batch_size=None))  # type: ignore[arg-type]
    units.average = own
    whole = sum(p.nbytes for p in module.parameters())
    return {
        "parameters": seen.parameters / whole,
        "gradients": seen.gradients / whole,
        "Adam": seen.adam / (2 * whole),
        "peak": meter.live.peak,
        "predicted": strategy.plan.predicted_peak_bytes,  # type: ignore[union-attr]
        "averaged": averaged[-1] if averaged else 0,
        "own": seen.gradients,
    }


def all_held() -> int:
    """Print shares of 1 / ranks of the grid; returns how many runs are beyond 3 % and 5 %."""
    print("| model | grid of ranks | parameters | gradients | Adam | peak, of the predicted | Eq. 8, of its bytes |")
    print("|---" * 7 + "|")
    beyond = 0
    for ranks, grids in {
        2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
        4: [(2, 2, 1), (2, 1, 2), (2, 1, 1)],
        8: [(2, 2, 2)],
    }.items():
        pool = Ranks(ranks, held, patience=200)
        for name in MODELS:
            for grid in grids:
                n, grid_of = grid[0] * grid[1] * grid[2], f"{' x '.join(map(str, grid))} of {ranks}"
                try:
                    found = pool.results(name, grid)
                except RuntimeError as error:
                    print(f"{name} on {grid_of}: {error}", file=sys.stderr, flush=True)
                    beyond += 1
                    continue
                shares = [max(one[key] for one in found) * n for key in ("parameters", "gradients", "Adam")]
                peak = max(one["peak"] for one in found) / found[0]["predicted"]
                beyond += max(shares) > 1.03 or abs(peak - 1) > 0.05
                eq8 = f"{found[0]['averaged'] / found[0]['own']:.2f}" if ranks > n else ""
                cells = [f"{share:.3f}" for share in shares]
                print("|", " | ".join([name, grid_of, *cells, f"{peak:.3f}", eq8]), "|", flush=True)
        pool.end()
    return beyond


def main() -> None:
    """Print one of the tables; exit status 1 where a figure is beyond its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.exit((all_held() if asked.held else compared()) > 0)


if __name__ == "__main__":
    main()
