"""A module on a grid of ranks trains with `offload` bit by bit as without, and gathered parameters stay; its bytes on
the device, on the host and on the way are the predicted ones."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp._torch import unseen
from tests.any_module import QUIET
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.offload.test_fit import Offloaded, spec_of
from tests.techniques.tensor3d.cases import GPT, Trained

WIDTH, INNER, ROWS = 16, 24, 256


class Wide(Trained):
    """Large weights, gathered over z, beside activations of which each begins a block that may run again."""

    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.GELU(), nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))  # noqa: E731
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(make() for _ in range(8))

    def loss(self, batch: Tensor) -> Tensor:
        h = self.first(batch)
        for block in self.blocks:
            h = h + functional.dropout(block(h), 0.1)
        return h.square().mean()


class Noted(Offloaded):
    """Notes losses and gradients of each step as the rank has them."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.gradients = list[float](), list[Tensor]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        # in memory that the meter does not count
        with unseen():
            self.gradients += [p.grad.clone() for p in module.parameters() if p.grad is not None]


def trained(
    kind: type[Trained], batches: list[Tensor], names: str, rank: int = 0, *, devices: int = 2, **options: Any
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    meter, module = Noted(), kind().double()
    own: dict[str, Any] = {"devices": 1}
    if names:
        own = {"strategy": AMPStrategy(strategies=names, **options), "devices": devices}
        own |= {"plugins": [RunningRanks(rank, devices)]} if devices > 1 else {}
    trainer = Trainer(**{**QUIET, "accelerator": "cpu", "max_epochs": 1, "callbacks": [meter], **own})
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    found: dict[str, Any] = {
        "losses": meter.losses,
        "gradients": meter.gradients,
        "state": module.state_dict(),
        "draws": torch.get_rng_state(),
        "peak": meter.live.peak,
    }
    if "offload" in names:
        assert meter.moves is not None
        spec = spec_of(trainer.strategy.plan)  # type: ignore[attr-defined]
        found["predicted"] = trainer.strategy.plan.predicted_peak_bytes, spec.host_bytes, spec.moved_bytes  # type: ignore[attr-defined]
        found["measured"] = meter.live.peak, meter.moves.pool.n_bytes, sum(meter.moves.sizes)
        assert meter.moves.came_bytes == spec.moved_bytes
    return found


def data(kind: type[Trained], z: int = 1, part: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    if kind is GPT:
        every = [torch.randint(0, 11, (8, 7), generator=draw) for _ in range(6)]
    else:
        every = [torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(6)]
    return [batch.chunk(z)[part] for batch in every]


X, Z = (2, 1, 1), (1, 1, 2)
CASES: list[tuple[type[Trained], tuple[int, int, int], str]] = [(GPT, X, ""), (Wide, Z, ""), (Wide, X, ",recompute")]


def on_grids(rank: int, ranks: int) -> list[list[dict[str, Any]]]:
    found = []
    for kind, grid, more in CASES:
        batches = data(kind, grid[2], rank if grid[2] > 1 else 0)
        names = [f"tensor3d{more}", f"tensor3d{more},offload"]
        found.append([trained(kind, batches, each, rank, tensor_grid=grid) for each in names])
    return found


@pytest.mark.ranks
def test_what_a_rank_of_a_grid_keeps_may_leave(tmp_path: Path) -> None:
    ranks = run_ranks(on_grids, 2, tmp_path)
    for n, case in enumerate(CASES):
        for rank in ranks:
            without, found = rank[n]
            for key in ("losses", "gradients", "state", "draws"):
                torch.testing.assert_close(found[key], without[key], rtol=0, atol=0)
            (peak, *host), (predicted, *on_host) = found["measured"], found["predicted"]
            assert host == on_host, case
            # as ranks compare what they do next
            assert peak == pytest.approx(predicted, abs=128), case
            assert peak < without["peak"]
    # gathered parameters stay: as much leaves as from the whole module with a rank's rows
    assert ranks[0][1][1]["measured"][2] == trained(Wide, data(Wide, 2), "offload", devices=1)["measured"][2]
    right = trained(GPT, data(GPT), "")
    for rank in ranks:
        for key in ("losses", "state"):
            torch.testing.assert_close(rank[0][1][key], right[key], rtol=1e-10, atol=1e-10)
