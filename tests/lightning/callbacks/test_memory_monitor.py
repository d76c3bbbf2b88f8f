"""StratumMemoryMonitor reports the exact bytes after every stratum and leaves no trace in other steps; pictures of it,
and of predictions, are whole.
"""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader

from lightning_amp import figures
from lightning_amp.lightning.callbacks.memory_monitor import COLUMNS, StratumMemoryMonitor, _MeasuredStep
from tests.any_module import QUIET
from tests.optimised import Optimised
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
)

N, D, K, B = 50, 8, 3, 4
ANY_BYTES = pytest.approx(1e4, rel=1)
ANCHORS = 4 * N * D
BATCH = 4 * B * D
# Anchors and one weight per stratum: parameters, gradients of the step before, momentum.
BASE = 3 * (ANCHORS + 4 * K) + BATCH


class Exponential(nn.Module):
    """Keeps one [N, D] for the backward pass: exp its result; the product before it is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        return (v * self.weight).exp().sum(), v


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strata = nn.ModuleList(Exponential() for _ in range(K))
        self.chained, self.n_anchors, self.dim = False, N, D

    def forward(self, v: Tensor) -> Tensor:
        losses = []
        for stratum in self.strata:
            loss, v = stratum(v)
            losses.append(loss)
        return torch.stack(losses).mean()


class Model(Optimised, by=torch.optim.SGD, lr=1e-3, momentum=0.9):
    def __init__(self, *, passes: int = 1, fails_at: int | None = None, skips_at: int | None = None) -> None:
        super().__init__()
        self.anchors = nn.Parameter(torch.ones(N, D))
        self.decoder = Decoder()
        self.passes, self.fails_at, self.skips_at = passes, fails_at, skips_at
        self.modes: list[bool] = []
        self.hooks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.modes.append(_get_current_dispatch_mode() is not None)
        self.hooks.append(sum(len(s._forward_hooks) for s in self.decoder.strata))
        if batch_idx == self.fails_at:
            raise RuntimeError("the step fails")
        return sum((self.decoder(self.anchors) for _ in range(self.passes)), start=torch.zeros(()))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skips_at else None

    def on_train_epoch_end(self) -> None:
        self.modes.append(_get_current_dispatch_mode() is not None)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([torch.ones(D) for _ in range(6 * B)], batch_size=B)  # type: ignore[arg-type]


def fit(monitor: StratumMemoryMonitor, model: pl.LightningModule, tmp_path: Path, **arguments: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **QUIET, callbacks=[monitor], **arguments
    )
    trainer.fit(model)
    return trainer


def planned() -> SimpleNamespace:
    return SimpleNamespace(
        strata_bytes=(1000, 2000, 4000), budget_bytes=10**6, predicted_peak_bytes=50_000, balance_cells=False
    )


@pytest.mark.parametrize("passes", [1, 2])
def test_bytes_by_hand_and_steps(tmp_path: Path, passes: int) -> None:
    monitor, model = StratumMemoryMonitor(every_n_steps=2, plot=False), Model(passes=passes)
    fit(monitor, model, tmp_path)
    assert [row["step"] for row in monitor.rows if row["stratum"] == "step"] == [1, 2, 4]
    assert model.modes[:-1] == [False, True, True, False, True, False], "other steps are not looked at"
    assert model.hooks == [0, K, K, 0, K, 0]
    assert len(monitor.rows) == 3 * (K + 1), "the first pass through the strata counts"
    for row in monitor.rows:
        assert set(row) == set(COLUMNS)
        assert (row["rank"], row["predicted_bytes"]) == (0, None)
        assert row["rss_bytes"] > 10**7
        base = BASE + 4  # the zero that the losses are added to
        k = row["stratum"]
        if k == "step":
            assert row["decoder"] == ""
            assert row["peak_bytes"] >= base + passes * K * (ANCHORS + 4)
            assert 0 <= row["current_bytes"] - BASE <= 64, "a step leaves nothing but the loss"
        else:
            assert row["decoder"] == "decoder"
            assert row["current_bytes"] == base + (k + 1) * (ANCHORS + 4), "each keeps its exp and its loss"
            assert row["peak_bytes"] == base + (k + 2) * ANCHORS + 4 * k, "v * weight beside its exp"


def test_files_of_a_fit_with_a_plan(tmp_path: Path) -> None:
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    strategy.plan = planned()  # type: ignore[attr-defined]
    monitor = StratumMemoryMonitor(every_n_steps=3)
    trainer = fit(monitor, Model(), tmp_path, strategy=strategy)
    folder = tmp_path / "amp_memory"
    assert sorted(p.name for p in folder.iterdir()) == ["memory.csv", "memory.jsonl", "memory.png"]
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    assert rows == monitor.rows
    assert [row["predicted_bytes"] for row in rows] == 2 * [1000, 2000, 4000, 50_000]
    with (folder / "memory.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{name: str(value) for name, value in row.items()} for row in rows]
    peak = max(row["peak_bytes"] for row in rows)
    assert trainer.callback_metrics["amp/peak_bytes"].item() == peak
    assert trainer.callback_metrics["amp/peak_predicted_bytes"].item() == 50_000


def test_an_exception_leaves_no_mode_and_writes_what_is_there(tmp_path: Path) -> None:
    monitor, model = StratumMemoryMonitor(every_n_steps=1, plot=False), Model(fails_at=2)
    with pytest.raises(RuntimeError, match="the step fails"):
        fit(monitor, model, tmp_path)
    assert model.modes == [False, True, True]
    assert _get_current_dispatch_mode() is None
    assert all(not stratum._forward_hooks for stratum in model.decoder.strata)
    lines = (tmp_path / "amp_memory" / "memory.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {1}


def test_an_exception_after_training_does_not_write_again(tmp_path: Path) -> None:
    monitor, model = StratumMemoryMonitor(plot=False), Model()
    trainer = fit(monitor, model, tmp_path)
    (tmp_path / "amp_memory" / "memory.csv").unlink()
    monitor.on_exception(trainer, model, RuntimeError("too late"))
    assert not (tmp_path / "amp_memory" / "memory.csv").exists(), "rank 0 alone would overwrite all ranks' rows"


def test_without_a_decoder_the_step_is_measured_by_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.decoder.strata.__class__ = nn.Sequential
    model.decoder.forward = lambda v: v.sum()  # type: ignore[method-assign]
    monitor = StratumMemoryMonitor(every_n_steps=1)
    with caplog.at_level("INFO"):
        trainer = fit(monitor, model, tmp_path)
    assert caplog.text.count("Model has no decomposed decoder") == 1
    assert [(row["step"], row["stratum"]) for row in monitor.rows] == [(k, "step") for k in range(1, 6)]
    assert trainer.callback_metrics["amp/peak_bytes"] > 0
    found = monitor.measured_step
    assert found is not None
    assert found.peak_bytes == monitor.rows[-1]["peak_bytes"]
    assert (found.by_kind["parameters"], found.by_kind["optimiser state"]) == (ANCHORS + 4 * K, ANCHORS)
    assert {moment.phase for moment in found.timeline} == {"forward", "backward", "optimiser"}
    assert monitor.modules()[0] == {"module": "", "predicted": None, "measured": ANY_BYTES, "ratio": None}
    folder = tmp_path / "amp_memory"
    assert {p.name for p in monitor.written} == {"memory.csv", "memory.jsonl", "memory_step.json", "memory.png"}
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "memory_step.json").read_text())["measured"]["peak_bytes"] == found.peak_bytes


def test_rows_go_through_checkpoints(tmp_path: Path) -> None:
    monitor = StratumMemoryMonitor(plot=False)
    trainer = fit(monitor, Model(), tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["StratumMemoryMonitor"]
    again = StratumMemoryMonitor()
    again.load_state_dict(state)
    assert again.rows == monitor.rows != []


def test_rows_are_those_of_one_run(tmp_path: Path) -> None:
    monitor = StratumMemoryMonitor(every_n_steps=1, plot=False)
    fit(monitor, Model(), tmp_path, max_steps=4)
    fit(monitor, Model(), tmp_path, max_steps=2)
    assert {row["step"] for row in monitor.rows} == {1}
    assert monitor.table()[-1]["stratum"] == "step"


def gather(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    monitor = StratumMemoryMonitor(plot=False, dirpath=folder)
    module = Model()
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=-1))
    trainer: Any = SimpleNamespace(is_global_zero=rank == 0, strategy=None, fit_loop=loops)
    monitor.on_train_start(trainer, module)
    measures = dict.fromkeys(COLUMNS[4:], 10 * rank)
    old = {"rank": 0, "step": 1, "decoder": "", "stratum": "step", **dict.fromkeys(COLUMNS[4:], 5)}
    monitor.rows = [old, {**old, "rank": rank, "step": 2, **measures}]
    monitor.on_train_end(trainer, module)
    return monitor.rows


@pytest.mark.ranks
def test_rank_zero_writes_the_rows_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    first, second = run_ranks(gather, 2, tmp_path / "meet", str(tmp_path / "out"))
    assert [(r["rank"], r["step"]) for r in first] == [(0, 1), (0, 2), (1, 2)], "rows of a checkpoint count once"
    assert len(second) == 2
    lines = (tmp_path / "out" / "memory.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == first


def test_on_cuda_what_is_reserved_is_shown_beside_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"memory_allocated": 3, "max_memory_allocated": 5, "memory_reserved": 8, "max_memory_reserved": 9}
    for name, n_bytes in measured.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, n_bytes=n_bytes: n_bytes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(Model, "device", torch.device("cuda", 0))
    on_device = SimpleNamespace(reserved_bytes=10)
    plan = SimpleNamespace(strata_bytes=(), predicted_peak_bytes=4, on_device=on_device, budget_bytes=None)
    trainer: Any = SimpleNamespace(global_rank=0, optimizers=[], strategy=SimpleNamespace(plan=plan))
    step = _MeasuredStep(trainer, Model(), torch.ones(1), 1)
    step.record_step()
    step.close()
    monitor = StratumMemoryMonitor()
    monitor.rows = step.rows
    found = [(row["stratum"], row["predicted"], row["measured"]) for row in monitor.table()]
    assert found == [("step", 4, 5), ("reserved", 10, 9)]


@pytest.mark.gpu
def test_cuda_peak_is_that_of_the_step() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1 << 26, device=device)
    trainer: Any = SimpleNamespace(global_rank=0, optimizers=[], strategy=None)
    step = _MeasuredStep(trainer, Model().to(device), torch.ones(1), 1)
    before, peak = step.read()
    assert peak == before, "the peak of what came before is forgotten"
    kept = torch.empty(1 << 20, device=device)
    torch.empty(1 << 22, device=device)
    assert step.read()[0] - before == kept.nbytes
    assert step.read()[1] - before == kept.nbytes + (1 << 24)


def image(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(imread(path)[:, :, :3])


def curve(path: Path, **options: Any) -> np.ndarray:
    given = {"predicted_bytes": [2e9, 3e9], "measured_bytes": [2.1e9, 2.9e9], "budget_bytes": None}
    figures.memory_curve(path, **{**given, **options}, title="Memory", rank_label="rank 0")
    return image(path)


@pytest.mark.long
def test_pictures_are_drawn_and_not_cut_off(tmp_path: Path) -> None:
    curve(tmp_path / "memory.png", budget_bytes=4e9)
    rng = np.random.default_rng(0)
    many = [f"a type with a long name {i % 40}" for i in range(60)]
    figures.embedding(tmp_path / "cells.png", xy=rng.normal(size=(60, 2)), labels={"type": many, "b": many}, title="t")
    maps = {"observed": rng.poisson(3, (9, 9)), "imputed": np.ones((9, 9))}
    bins = {"chromosomes": ["chr1"] * 5 + ["chr2"] * 4, "starts": [10**6 * i for i in (*range(5), *range(4))]}
    figures.contact_maps(tmp_path / "maps.png", rows={"": maps}, **bins, title="Contacts")
    figures.contact_maps(tmp_path / "none.png", rows={"": {"observed": np.zeros((9, 9))}}, **bins, title="Contacts")
    for path in tmp_path.iterdir():
        picture = image(path)
        assert picture.std() > 0.05
        border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
        assert (border > 0.99).all(), f"{path.name}: something touches the border"
