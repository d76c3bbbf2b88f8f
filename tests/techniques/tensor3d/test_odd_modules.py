"""Claim: modules with unusual code are trained exactly on a grid, or all ranks refuse them with one message."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError
from tests.any_module import QUIET
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.tensor3d.odd_modules import AROUND, KEPT, LAYERS, ROWS, WEIGHTS, Odd

Grid = tuple[int, int, int]
TABLES = {"weights": WEIGHTS, "kept": KEPT, "layers": LAYERS, "around": AROUND}
STEPS, BOUND = 3, 1e-10
UNNAMED = "whose training step fails: "
"""In a message: an error of torch or of Python follows."""
REFUSED = {
    "a scripted layer": "is a ScriptModule",
    "a lazy layer": "must have its shape before training starts",
    "a teacher that sees other features": "calls 'add_' on the parameter",
    "a weight of norm 1 after a step": "calls 'linalg_vector_norm' on the parameter",
    "a running mean, assigned": "a file would hold one rank's part",
    "embedding of bounded norm": "it writes into a copy",
    "a gradient penalty": "a backward pass was begun by",
    "a backward hook that clamps": "autograd Functions do not see parts",
}
"""Part of the message; where features are not split, some of them are exact."""
REFUSED_ON_TWO_AXES = {
    "a queue of features": "it writes sharded values into a tensor that every rank has whole",
    "a reentrant checkpoint": "call checkpoint with use_reentrant=False",
}


def trained(one: Odd, rank: int = 0, grid: Grid | None = None, ranks: int = 1) -> dict[str, Tensor]:
    """Everything that has to be equal after three steps: losses, parameters, buffers and logged values."""
    seed_everything(3, verbose=False)
    batches = [one.batch() for _ in range(STEPS)]
    given: dict[str, Any] = {"devices": 1, "accelerator": "cpu", "use_distributed_sampler": False, "max_epochs": 1}
    if grid is not None:
        rows = ROWS * grid[0] * grid[1] // ranks
        first = rank // (grid[0] * grid[1]) * rows
        batches = [_rows(batch, slice(first, first + rows)) for batch in batches]
        strategy = AMPStrategy(strategies="tensor3d", tensor_grid=grid)
        given |= {"strategy": strategy, "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    module = one.make().double()
    trainer = Trainer(**QUIET | given)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    found = {f"state {name}": value for name, value in module.state_dict().items()}
    losses: Any = module.losses
    found |= {f"losses {i}": value for i, value in enumerate(losses)}
    logged = trainer.callback_metrics.items()
    found |= {f"logged {name}": value for name, value in logged if name != "loss"}
    return {name: value.detach().clone() for name, value in found.items()}


def _rows(batch: Any, cut: slice) -> Any:
    return tuple(_rows(one, cut) for one in batch) if isinstance(batch, tuple) else batch[cut]


def on_rank(rank: int, ranks: int, table: str, grid: Grid, names: list[str]) -> dict[str, Any]:
    """The values of each module, or the message that refuses it."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names:
        try:
            # what cannot be written to a file is refused too
            found[name] = pickle.loads(pickle.dumps(trained(TABLES[table][name], rank, grid, ranks)))
        except AmpError as error:
            found[name] = str(error).replace(f"on rank {rank}", "on a rank")
    return found


def apart(found: list[dict[str, Tensor]], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any rank, and of what; losses of data ranks are shares of one."""
    worst, where = 0.0, ""
    for key, value in right.items():
        own = [one[key] for one in found]
        assert all(one.shape == value.shape for one in own), key
        for one in [torch.stack(own).mean(0)] if key.startswith("losses") else own:
            scale = value.abs().max().clamp(min=1) if value.is_floating_point() and value.numel() else 1
            error = float(((one.double() - value.double()).abs() / scale).max()) if one.numel() else 0.0
            if not error <= worst:
                worst, where = error, key
    return worst, where


@BEFORE_A_RELEASE[0]
@BEFORE_A_RELEASE[1]
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize("table", TABLES)
def test_they_are_exact_or_refused(table: str, grid: Grid, tmp_path: Path) -> None:
    split = grid[0] * grid[1] > 1
    # rows over data ranks draw other numbers than those of one process
    names = [name for name, one in TABLES[table].items() if split or not one.by_rows]
    ranks = grid[0] * grid[1] * grid[2]
    by_rank = run_ranks(on_rank, ranks, tmp_path, table, grid, names, timeout=600)
    wrong = {name: judged(name, TABLES[table][name], [one[name] for one in by_rank], grid) for name in names}
    found = [f"{name}: {why}" for name, why in wrong.items() if why]
    assert not found, "\n".join(found)


def judged(name: str, one: Odd, found: list[Any], grid: Grid) -> str:
    """What is wrong."""
    said = REFUSED | (REFUSED_ON_TWO_AXES if grid[0] > 1 and grid[1] > 1 else {})
    if isinstance(found[0], str):
        if found != found[:1] * len(found) or UNNAMED in found[0]:
            return f"ranks say {found!r}"
        return "" if name in said and said[name] in found[0] else f"refused: {found[0]}"
    split = grid[0] * grid[1] > 1
    if name in said and split:
        return "not refused"
    error, where = apart(found, found[0] if one.drawn and split else trained(one))
    return "" if error <= BOUND else f"{where} differs by {error:.1e}"
