"""Claim: a module on a grid of ranks trains as one process does, in float64, with recomputed blocks, batch
normalisation in them, checkpoints in parts and mixed precision."""

import random
import warnings
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.lightning.checkpoints.write_checkpoint import convert_checkpoint
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.splits import Split, Splits
from lightning_amp.techniques.tensor3d import choose_grid
from lightning_amp.techniques.tensor3d.grid import Grid as RankGrid
from lightning_amp.techniques.tensor3d.grid_seconds import GridCost
from lightning_amp.techniques.tensor3d.parameters import GridParameter
from tests.any_module import QUIET, Meter
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import CASES, GPT, Case, Trained

Grid = tuple[int, int, int]


def run(
    case: Case,
    grid: Grid | None = None,
    rank: int = 0,
    ranks: int = 1,
    *,
    options: Any = None,
    ckpt: str | None = None,
    save: str = "",
    dtype: torch.dtype = torch.float64,
    **given: Any,
) -> dict[str, Any]:
    """Three steps with a validation; without a grid on one process, without the strategy."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    batches = [case.batch() for _ in range(3)]
    batches = [batch.to(dtype) if batch.is_floating_point() else batch for batch in batches]
    strategy: dict[str, Any] = {"devices": 1}
    if grid is not None:
        x, y, z = grid
        # where z splits samples its ranks have the same
        same = x * y * (z if "sequence_dim" in (options or {}) else 1)
        samplers = ranks // same
        rows = max(1, 4 // max(1, samplers))
        batches = [batch[rank // same * rows :][:rows] for batch in batches]
        made = AMPStrategy(**{"strategies": "tensor3d", "tensor_grid": grid, **(options or {})})
        strategy = {"strategy": made, "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    loader, meter = DataLoader(batches, batch_size=None), Meter()  # type: ignore[arg-type]
    trainer = Trainer(
        **{
            **QUIET,
            "accelerator": "cpu",
            "max_epochs": 1,
            "num_sanity_val_steps": 1,
            "callbacks": [meter],
            "use_distributed_sampler": False,
            **strategy,
            **given,
        }
    )
    module = case.module().to(dtype)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    parameters = [*module.parameters()]
    if save:
        # at the end of the fit parameters are whole
        trainer.callbacks.append(LambdaCallback(on_train_epoch_end=lambda t, _: t.save_checkpoint(save)))
    trainer.fit(module, loader, loader, ckpt_path=ckpt)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True)), "parameters stay"
    assert shapes == {name: p.shape for name, p in module.named_parameters()}
    assert not [name for name in vars(module) if name.endswith("_step")], "the module is as it was"
    plan = getattr(trainer.strategy, "plan", None)
    return {
        "losses": torch.stack(module.losses),
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "valid": float(trainer.callback_metrics["valid"]),
        "plan": None if plan is None else plan.to_json(),
        "peak": meter.live.peak,
    }


def same(ranks: list[dict[str, Any]], right: dict[str, Any]) -> list[dict[str, Any]]:
    """Losses over all rows, metrics and parameters of all ranks are those of one process."""
    losses = torch.stack([one["losses"] for one in ranks]).mean(0)
    torch.testing.assert_close(losses, right["losses"], rtol=1e-10, atol=0)
    for one in ranks:
        assert one["valid"] == pytest.approx(right["valid"], rel=1e-10)
        torch.testing.assert_close(one["state"], right["state"], rtol=1e-10, atol=1e-10)
    return ranks


def close(found: dict[str, Tensor], right: dict[str, Tensor], what: object) -> None:
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{what} {n}: {m}")


def as_predicted(ranks: list[dict[str, Any]], what: object) -> Plan:
    """The plan, whose peak the ranks have."""
    plan = Plan.from_json(ranks[0]["plan"])
    peak = max(one["peak"] for one in ranks)
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.05, abs=4096), what
    return plan


CACHED = {"options": {"tensor_cache": "1MiB"}}


ROWS: list[tuple[str, Grid]] = [
    *((name, (2, 2, 1)) for name in CASES),
    *((name, (2, 1, 2)) for name in ("gpt", "separable")),
    ("convolutional", (1, 2, 1)),
]
"""Every module over x and y; over z, with its averages, and on copies of a grid those of most operators."""


def on_grids(rank: int, ranks: int, rows: list[tuple[str, Grid]]) -> dict[Any, Any]:
    """With the roles of x and y as planned, also where it is faster to exchange them."""

    def as_planned(costs: list[GridCost], budget: int | None) -> list[GridCost]:
        return [cost for cost in costs if not cost.exchanged]

    with patch.object(choose_grid, "ranked", as_planned):
        return {
            (name, grid): run(CASES[name], grid, rank, ranks, **(CACHED if (name, grid) == ("gpt", (1, 1, 2)) else {}))
            for name, grid in rows
        }


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "rows"), [
    pytest.param(4, ROWS, id="few"),
    pytest.param(2, [*product(CASES, [(2, 1, 1), (1, 2, 1), (1, 1, 2)])], id="2", marks=BEFORE_A_RELEASE),
    pytest.param(4, [*product(CASES, [(2, 2, 1), (2, 1, 2), (1, 2, 1)])], id="4", marks=BEFORE_A_RELEASE),
])  # fmt: skip
def test_modules_train_as_one_process_does(tmp_path: Path, ranks: int, rows: list[tuple[str, Grid]]) -> None:
    """Losses, parameters and metrics, with the predicted peak, once with a cache; a grid of two ranks on four has two
    copies.
    """
    found = run_ranks(on_grids, ranks, tmp_path, rows)
    rights = {name: run(case) for name, case in CASES.items()}
    for name, grid in rows:
        as_predicted(same([one[name, grid] for one in found], rights[name]), (name, grid))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv1d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm1d(2 * width)
        self.depth = nn.Conv1d(2 * width, 2 * width, 5, padding=2, groups=2 * width, bias=False)
        self.two = nn.Conv1d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(self.norm(self.one(x)))
        return x + self.two(self.depth(h).tanh())


class Residuals(Trained):
    """Blocks with running statistics, which run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Conv1d(2, 6, 3), nn.Sequential(*[Residual(6) for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        return (self.blocks(self.first(batch)).mean(-1) - 1).square().mean()  # type: ignore[no-any-return]


RESIDUALS = Case(Residuals, lambda: torch.randn(4, 2, 21).double())
IN_PARTS = {"save_distributed_checkpoint": True}


class Placed(GPT):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.place)


class Later(Trained):
    """Its parameters are made on "meta"."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Placed().double()

    def loss(self, batch: Any) -> Tensor:
        return self.net.loss(batch)  # type: ignore[no-any-return]


def later(path: str, grid: Grid | None = None, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Losses of a fit, what a rank held of parameters while they were made, and a validation of what was saved."""
    warnings.simplefilter("ignore")
    module, most = Later(), [0]
    seed_everything(3, verbose=False)
    batches = [CASES["gpt"].batch() for _ in range(3)]
    given: dict[str, Any] = {"devices": 1}
    if grid is None:
        module.configure_model()
        module.to_empty(device="cpu")
        # to_empty makes two of a shared one
        module.net.head.weight = module.net.embed.weight
        for child in module.modules():
            if isinstance(child, nn.Linear | nn.Embedding | nn.LayerNorm | Placed):
                child.reset_parameters()
    else:
        samplers = ranks // (grid[0] * grid[1])
        batches = [b[rank // (grid[0] * grid[1]) * 4 // samplers :][: 4 // samplers] for b in batches]
        options = {"strategies": "tensor3d", "tensor_grid": grid, **IN_PARTS}
        given = {"devices": ranks, "strategy": AMPStrategy(**options), "plugins": [RunningRanks(rank, ranks)]}
    reset = nn.Linear.reset_parameters

    def recorded(layer: nn.Linear) -> None:
        reset(layer)
        held = {id(p): p.untyped_storage().nbytes() for p in module.parameters()}
        most[0] = max(most[0], sum(held.values()))

    save = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(path))
    options = {**QUIET, "callbacks": [save], "max_epochs": 1, "use_distributed_sampler": False, **given}
    trainer, loader = Trainer(accelerator="cpu", **options), DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with patch.object(nn.Linear, "reset_parameters", recorded):
        trainer.fit(module, loader)
    losses, left = torch.stack(module.losses), any(p.isfinite().any() for p in module.parameters())
    valid = trainer.validate(module, loader, ckpt_path=path, weights_only=False, verbose=False)[0]["valid"]
    return {"losses": losses, "held": most[0], "valid": valid, "left": left}


class ByHand(Trained):
    """Two optimisers, two backward passes in a step, gradients of two batches, and clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make, self.judge = nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(second)
        made = self.make(batch)
        judged = (self.judge(made.detach()) - 1).square().mean()
        second.zero_grad()
        self.manual_backward(judged)
        self.clip_gradients(second, gradient_clip_val=0.1)
        second.step()
        self.untoggle_optimizer(second)
        loss = self.judge(made).square().mean()
        self.manual_backward(loss)
        if batch_idx % 2:
            first.step()
            first.zero_grad()
        self.losses.append(loss.detach() + judged.detach())

    def loss(self, batch: Any) -> Tensor:
        return self.judge(self.make(batch)).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.make, self.judge)]


RESUMED: dict[str, Any] = {
    "gated": {"grid": (1, 2, 2), "options": IN_PARTS},
    "gpt": {"grid": (1, 1, 4), "options": {"strategies": "fsdp", "tensor_grid": None}},
}
AGAIN = {"options": {"strategies": ["tensor3d", "recompute"]}}
RUNS: dict[str, tuple[Case, Grid, dict[str, Any]]] = {
    "gpt": (CASES["gpt"], (2, 2, 1), AGAIN),
    "residuals": (RESIDUALS, (2, 1, 2), AGAIN),
    "samples": (CASES["gpt"], (1, 2, 2), {"options": {"sequence_dim": {"batch": 1}}}),
    "by hand": (Case(ByHand, CASES["gated"].batch), (2, 1, 2), {}),
}


def on_ranks(rank: int, ranks: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {name: run(case, grid, rank, ranks, **more) for name, (case, grid, more) in RUNS.items()}
    for name, more in RESUMED.items():
        path = f"{folder}/{name}.ckpt"
        run(CASES[name], (2, 1, 2), rank, ranks, options=IN_PARTS, save=path)
        found["resumed", name] = run(CASES[name], rank=rank, ranks=ranks, ckpt=path, max_epochs=2, **more)
    found["later"] = later(f"{folder}/later.ckpt", (2, 1, 2), rank, ranks)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("together")
    return [*run_ranks(on_ranks, 4, folder, str(folder), timeout=400), folder]


@pytest.mark.full
@pytest.mark.ranks
def test_modules_train_as_on_one_process(found: list[Any]) -> None:
    """Recomputed blocks with their predicted peak, and running statistics of all rows on every rank; tokens split over
    z, with features split over the other axes; steps that optimise by hand.
    """
    *found, _ = found
    for name, (case, grid, _) in RUNS.items():
        ranks = same([one[name] for one in found], run(case))
        if name == "samples":
            # as under `sequence` the peak is that of the first rank
            assert as_predicted(ranks[:1], name).mesh.model == prod(grid)
        elif name != "by hand":
            assert "recompute" in as_predicted(ranks, name).strategies


@pytest.mark.ranks
def test_checkpoints_in_parts_fit_any_grid_fsdp_and_one_process(found: list[Any]) -> None:
    """No rank has written a tensor that is split whole; a scalar parameter is."""
    *found, folder = found
    for name in RESUMED:
        path, plain = folder / f"{name}.ckpt", folder / f"{name}.plain.ckpt"
        kept = FileSystemReader(path).read_metadata().state_dict_metadata
        chunks = {key: len(one.chunks) for key, one in kept.items() if isinstance(one, TensorStorageMetadata)}
        assert min(n for key, n in chunks.items() if "weight" in key) > 1, chunks
        convert_checkpoint(path, plain)
        right = run(CASES[name], max_epochs=2)["state"]
        close(run(CASES[name], ckpt=str(plain), max_epochs=2)["state"], right, name)
        for one in found:
            close(one["resumed", name]["state"], right, name)


@pytest.mark.ranks
def test_parameters_on_meta_get_values_one_module_at_a_time(found: list[Any]) -> None:
    """As one process that resets them does; no rank has all of them, at the end of the fit too."""
    *found, folder = found
    right = later(str(folder / "later on one.ckpt"))
    whole = sum(p.nbytes for p in GPT().double().parameters())
    for one in found:
        assert one["later"]["held"] < 0.6 * whole
        assert not one["later"]["left"]
        assert one["later"]["valid"] == pytest.approx(right["valid"], rel=1e-10)
    losses = torch.stack([one["later"]["losses"] for one in found]).mean(0)
    torch.testing.assert_close(losses, right["losses"], rtol=1e-10, atol=0)


def test_boxes_of_all_ranks_make_up_a_parameter() -> None:
    draw = random.Random(0)
    for _ in range(60):
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 4)))
        sizes = draw.choice([(2, 1, 1), (2, 2, 1), (1, 2, 3), (2, 3, 2), (1, 1, 5)])
        dims = {name: d for name, d in zip("xy", draw.sample(range(4), 2), strict=True) if d < len(shape)}
        owners = {
            name: Owners.from_vector([draw.randrange(n) for _ in range(shape[dims[name]])], n)
            for name, n in zip("xy", sizes, strict=False)
            if name in dims
        }
        whole, joined = torch.randn(shape), torch.full(shape, torch.nan)
        for ranks in product(*map(range, sizes)):
            grid = RankGrid.dry(sizes, ranks=ranks)
            splits = Splits.of([Split(getattr(grid, n), dims[n], o) for n, o in owners.items()])
            parameter = GridParameter(nn.Parameter(whole), grid, splits)
            for offsets, values in parameter.boxes(parameter.own(whole)):
                place = tuple(slice(a, a + n) for a, n in zip(offsets, values.shape, strict=True))
                assert joined[place].isnan().all(), "an entry is on one rank"
                joined[place] = values
        assert torch.equal(joined, whole), (shape, sizes, dims)
