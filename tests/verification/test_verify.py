"""Claim: verify finds clean models equal, and names what breaks equivalence in others, and nothing else."""

import gc
import json
import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.cli.main import main
from lightning_amp.cli.verify import _decided
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import AmpError, DataError, PlanError
from lightning_amp.models.glue import GLUE
from lightning_amp.verification import split_batch as cut
from lightning_amp.verification import workers as workers_file
from lightning_amp.verification.result import Culprit, Row, Verification
from lightning_amp.verification.tolerances import allowed, errors, loss_errors, swamped
from lightning_amp.verification.verify import compare, subject_of
from lightning_amp.verification.workers import Workers
from tests.verification import verify_cases as cases
from tests.verification.verify_cases import cells

CONFIG = Template("""\
seed_everything: 0
trainer:
  strategy: {class_path: lightning_amp.AMPStrategy, init_args: {strategies: "S1,S3", share_batch_statistics: $share}}
  accelerator: gpu
  devices: 8
model:
  class_path: lightning_amp.GLUE
  init_args: {latent_dim: 8, hidden_dim: 16, window: 8, edges_per_step: 64}
data:
  class_path: lightning_amp.SingleCellDataModule
  init_args: {data_dir: $data, batch_size: 12}
ckpt_path: null
""")

IN_MAIN = """\
import torch
from lightning.pytorch import LightningModule
import lightning_amp

class Inline(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

print(lightning_amp.verify(Inline(), torch.ones(4, 3), steps=1, precisions=["float64"]))
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "data"
    synthesize(out, cells=30, rna_cells=30, bins=24, strata=3, genes=20, seed=2)
    return out


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(2, tmp_path_factory.mktemp("workers"), timeout=240) as pool:
        yield pool


def verified(
    workers: Workers, module: LightningModule, data: Any, *, precisions: Any = ("float64",), **options: Any
) -> Verification:
    (workers.folder / "subject.pt").write_bytes(subject_of(module, data, 2))
    (workers.folder / "batches.pt").unlink(missing_ok=True)
    found = compare(workers, devices=2, options=options, steps=2, precisions=precisions)
    assert all(len(line) <= 80 for line in str(found).splitlines())
    assert json.loads(json.dumps(found.to_dict()))["ok"] is found.ok
    return found


def named(found: Verification) -> list[tuple[str, str]]:
    return [(culprit.cause, re.sub(r":\d+", ":", culprit.where)) for culprit in found.culprits]


CLEAN = {
    "even": (cases.Clean, cells(8)),
    "uneven": (cases.Clean, cells(7)),
    "edges": (cases.EdgesDrawn, cells(8)),
    "adversarial": (cases.Adversarial, cells(7)),
    "amplified": (cases.Amplified, cells(8)),
    "as advised": (cases.MaskedOverRanks, cells(8)),
    "modalities": (cases.Modalities, {"a": cells(8), "b": cells(6)}),
    "scale of all ranks' cells": (lambda: cases.Scaled(cases.SharedScale()), cells(7)),
    "plain tensor": (cases.Inline, torch.ones(4, 3)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CLEAN)
def test_clean_modules_are_equal_and_nothing_is_accused(workers: Workers, name: str) -> None:
    module, batch = CLEAN[name]
    precisions = ("float32", "float64") if name == "adversarial" else ("float64",)
    found = verified(workers, module(), batch, precisions=precisions)
    assert found.ok
    assert found.culprits == ()
    assert "The ranks train as one process does." in str(found)
    rows = {row.quantity: row for row in found.rows if row.precision == "float64"}
    assert {"loss, step 1", "gradients, step 1", "loss, later steps", "parameters after 2 steps"} <= set(rows)
    names = {name for name, _ in module().named_parameters()}
    if name == "amplified":
        assert 1e-9 < rows["parameters after 2 steps"].error < rows["parameters after 2 steps"].allowed < 1e-5
    assert set(rows["gradients, step 1"].errors) == set(rows["parameters after 2 steps"].errors) == names


LINE = "in verify_cases.py:"
CULPRITS: dict[str, tuple[LightningModule, Any, dict[str, Any], list[tuple[str, str]]]] = {
    "dropout": (
        cases.Clean(nn.Dropout(0.5)), cells(8), {}, [("random draws", f"middle (Dropout), bernoulli {LINE}")]
    ),
    "draws": (
        cases.Samples(), cells(8), {}, [("random draws", f"training_step, randn_like {LINE}")]
    ),
    "uneven draws": (
        cases.Samples(), cells(5), {}, [("random draws", f"training_step, randn_like {LINE}")]
    ),
    "two draws, and one that nothing reads": (
        cases.SamplesTwice(),
        cells(8),
        {},
        [
            ("random draws", f"training_step, randn_like {LINE}"),
            ("random draws", f"middle (Dropout), bernoulli {LINE}"),
        ],
    ),
    "mask": (cases.Masked(), cells(8), {}, [("mean of means", "the loss in training_step")]),
    "uneven mask": (cases.Masked(), cells(7), {}, [("mean of means", "the loss in training_step")]),
    "sum": (cases.Summed(), cells(8), {}, [("sum over samples", "the loss in training_step")]),
    "own statistics": (cases.Clean(cases.Centred()), cells(8), {}, [("batch statistics", "middle")]),
    "statistics per rank": (
        cases.Clean(), cells(8), {"share_batch_statistics": False}, [("batch statistics", "encoder.1")]
    ),
    "three at once": (
        cases.Masked(nn.Dropout(0.5)),
        cells(8),
        {"share_batch_statistics": False},
        [
            ("mean of means", "the loss in training_step"),
            ("random draws", f"middle (Dropout), bernoulli {LINE}"),
            ("batch statistics", "encoder.1"),
        ],
    ),
    "modalities": (cases.Modalities(), {"a": cells(8), "b": cells(7)}, {}, [("unequal parts", "training_step")]),
    "buffer": (cases.Centre(), cells(8), {}, [("buffers", "centre")]),
    "running scale": (
        cases.Scaled(cases.RunningScale()), cells(8), {}, [("buffers", "encoder.0.mean; encoder.0.scale")]
    ),
    "running scale, uneven, of the steps before": (
        cases.Scaled(cases.RunningScale(late=True)), cells(7), {}, [("buffers", "encoder.0.mean; encoder.0.scale")]
    ),
    "running scale after a layer with statistics of its own": (
        cases.Scaled(nn.Sequential(cases.Centred(), cases.RunningScale())),
        cells(8),
        {},
        [("batch statistics", "encoder.0.0"), ("buffers", "encoder.0.1.scale")],
    ),
    "running scale, and a mask": (
        cases.ScaledAndMasked(), cells(8), {}, [("buffers", "encoder.0.mean; encoder.0.scale")]
    ),
    "rank": (cases.ByRank(), cells(8), {}, [("unknown", "")]),
    "late": (cases.Late(), cells(8), {}, [("mean of means", "the loss in training_step")]),
    "not finite": (cases.NotFinite(), cells(8), {}, [("not finite", "loss, step 1, float64")]),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("name", CULPRITS)
def test_culprits_are_named_and_nothing_else_is(workers: Workers, name: str) -> None:
    module, batch, options, expected = CULPRITS[name]
    found = verified(workers, module, batch, **options)
    assert not found.ok
    assert named(found) == expected
    assert "The ranks do not train as one process does." in str(found)
    if name == "rank":
        assert "draws from numpy.random" in found.culprits[0].evidence


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "strategies", "mesh", "n_cells"),
    [
        ("attention", "S1,S2,S3,S4,S5", (1, 2), 5),
        ("attention", "S1,S3,stream", (2, 1), 7),
        ("full_attention", "S1,S4,nodes,stream", (1, 2), 5),
    ],
)
def test_the_reference_model_is_equal(
    workers: Workers, data_dir: Path, key: Any, strategies: str, mesh: tuple[int, int], n_cells: int
) -> None:
    """Ranks of a model group read the same cells; draws of the others are keyed by the cell."""
    window = 8 if key == "attention" else None
    model = GLUE(latent_dim=8, hidden_dim=16, key=key, window=window, edges_per_step=64)
    data = SingleCellDataModule(data_dir, batch_size=n_cells)
    found = verified(workers, model, data, strategies=strategies, model_parallel_size=mesh[1])
    assert found.ok, str(found)
    assert (found.mesh, found.cells, set(found.strategies)) == (mesh, n_cells, set(strategies.split(",")))
    (forward,) = (row for row in found.rows if row.quantity.startswith("forward"))
    assert any(name.startswith("encoders.hic") for name in forward.errors)


def test_what_cannot_be_verified_is_refused_and_the_next_one_is_not(workers: Workers) -> None:
    with pytest.raises(
        AmpError, match=r"(?s)ArithmeticError was raised in the single process: on purpose.*loss"
    ):
        verified(workers, cases.Raises(), cells(8))
    with pytest.raises(AmpError, match=r"ArithmeticError was raised in rank [01]: on purpose"):
        verified(workers, cases.RaisesOnRank(), cells(8))
    with pytest.raises(DataError, match=r"a batch of 1 samples was to be split over 2 data ranks"):
        verified(workers, cases.Inline(), torch.ones(1, 3))
    with pytest.raises(PlanError, match=r"S5 requires a decoder of strata"):
        verified(workers, cases.Inline(), torch.ones(4, 3), strategies="S1,S5", model_parallel_size=2)
    assert verified(workers, cases.Inline(), torch.ones(4, 3)).ok


@pytest.mark.exhaustive
@pytest.mark.release
def test_the_command_reads_the_configuration_of_fit(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.substitute(data=data_dir, share="false"))
    words = ["verify", "--config", str(config), "--precision", "float64", "--steps", "2", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_amp", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["strategies"], found["mesh"], found["cells"]) == (["S1", "S3"], [2, 1], 12)
    assert {culprit["cause"] for culprit in found["culprits"]} == {"batch statistics"}
    assert main(["verify", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml' was asked of verify and is no file" in capsys.readouterr().err


def test_another_plan_than_the_configurations_leaves_out_how_that_is_done() -> None:
    options = {"strategies": "fsdp", "fsdp_ranks": 2, "micro_batches": None, "device_memory": "1GiB"}
    asked = Namespace(policy=None, strategies=None, plan=None, model_parallel_size=None)
    assert _decided(options, asked) == options
    asked.strategies = "S1"
    assert _decided(options, asked) == {"device_memory": "1GiB", "strategies": "S1"}


@pytest.mark.full
@pytest.mark.long
def test_a_session_without_a_file_can_verify_its_own_classes() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=IN_MAIN, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "The ranks train as one process does." in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, r"devices=0 was asked of verify"),
        ({"steps": 1.5}, r"steps=1.5 was asked of verify"),
        ({"precisions": ["bf16"]}, r"precisions=\['bf16'\] was asked of verify"),
        ({"policy": "best"}, r"policy='best'"),
    ],
)
def test_requests_are_checked_before_anything_starts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        lightning_amp.verify(cases.Clean(), cells(8), **options)


def test_what_cannot_be_sent_or_read_is_refused_before_anything_starts() -> None:
    module = cases.Clean()
    module.scale = lambda x: x
    with pytest.raises(AmpError, match=r"Clean and its data to other processes, and they cannot be pickled"):
        lightning_amp.verify(module, cells(8))
    with pytest.raises(DataError, match=r"a loader without batches"):
        lightning_amp.verify(cases.Clean(), DataLoader([]))


def test_parts_of_a_batch_make_up_the_batch() -> None:
    dense = torch.arange(21.0).reshape(7, 3)
    sparse = SparseCounts.from_dense(torch.arange(14).reshape(7, 2) % 3)
    batch = {"a": {"x": sparse, "y": (dense, [np.arange(7)]), "name": "run"}, "b": {"x": dense[:5]}}
    parts = [cut.part_of(batch, rank, 3) for rank in range(3)]
    assert [len(part["a"]["x"]) for part in parts] == [3, 2, 2]
    assert [len(part["b"]["x"]) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["a"]["x"].to_dense() for part in parts]), sparse.to_dense())
    assert torch.equal(torch.cat([part["a"]["y"][0] for part in parts]), dense)
    assert parts[1]["a"]["y"][1][0].tolist() == [3, 4]
    assert parts[2]["a"]["name"] == "run"
    assert cut.starts(batch, 1, 3) == {2: 2}
    assert cut.starts(dense, 2, 3) == {2: 5}
    equal, same = cut.equal_parts(batch, 3), cut.same_parts(batch, 3)
    assert (len(equal["a"]["x"]), len(equal["b"]["x"])) == (6, 3)
    assert torch.equal(same["a"]["y"][0], torch.cat([dense[:3]] * 3))
    assert torch.equal(same["a"]["x"].to_dense(), torch.cat([sparse.to_dense()[:3]] * 3))
    assert cut.cast(batch, torch.float64)["b"]["x"].dtype is torch.float64
    assert cut.cast(batch, torch.float64)["a"]["x"].dtype is sparse.dtype
    with pytest.raises(DataError, match=r"found first axes \[4, 7\]"):
        cut.check_divisible([dense, dense[:4]], 2)
    cut.check_divisible([dense, dense[:4]], 1)


def test_errors_are_relative_and_nothing_is_passed_over() -> None:
    one = {"a": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([1e-20])}
    found = {"a": torch.tensor([3.0, 4.5]), "tiny": torch.tensor([2e-20])}
    assert errors(found, one) == pytest.approx({"a": 0.1, "tiny": 2e-19}, rel=1e-6)
    assert errors({"a": one["a"]}, one)["tiny"] == math.inf
    assert errors(one, {"a": one["a"]})["tiny"] == math.inf
    assert errors({"a": one["a"][:1]}, {"a": one["a"]})["a"] == math.inf
    assert math.isnan(errors({"a": one["a"] / 0 * 0}, {"a": one["a"]})["a"])
    assert loss_errors([[1.0], [3.0]], [[1.0], [2.0]]) == {"step 1": 0.0, "step 2": 0.5}
    assert math.isnan(loss_errors([[1.0]], [[1.0, 2.0]])["step 1, backward 2"])
    assert math.isnan(loss_errors([[math.inf]], [[math.inf]])["step 1"])
    nudged = {"a": 0.0, "b": 1e-9, "c": 1.0, "d": math.nan}
    assert allowed("gradients", "float64", nudged) == pytest.approx(
        {"a": 1e-10, "b": 3e-8, "c": 1e-6, "d": 1e-10}
    )
    assert max(allowed("parameters", "float32", nudged).values()) == 1e-2
    assert swamped("float64", nudged) == swamped("float32", nudged) == {"c"}
    assert swamped("float32", {"e": 3e-4}) == set()


def test_a_row_is_as_good_as_its_worst_tensor() -> None:
    row = Row(
        quantity="gradients",
        precision="float64",
        errors={"a": 1e-3, "b": 1e-6},
        tolerances={"a": 1e-2, "b": 1e-9},
    )
    assert (row.worst, row.error, row.allowed, row.ok, row.wrong) == ("b", 1e-6, 1e-9, False, ["b"])
    unclear = Row(
        quantity="gradients",
        precision="float32",
        errors={"encoders.hic.first.bias": 0.3, "b": 1e-5},
        tolerances={"encoders.hic.first.bias": 1e-2, "b": 1e-4},
        swamped=frozenset({"encoders.hic.first.bias"}),
    )
    assert (unclear.ok, unclear.wrong, unclear.unclear) == (False, [], ["encoders.hic.first.bias"])
    assert not replace(unclear, errors={"encoders.hic.first.bias": math.inf, "b": 0.0}).unclear
    told = Row(quantity="gradients", precision="float64", errors={"b": 0.0}, tolerances={"b": 1e-9})
    for rows, ok, words in (
        ((unclear, told), True, "The ranks train as one process does."),
        ((unclear,), False, "Cannot tell whether the ranks train as one process does"),
        ((unclear, row), False, "The ranks do not train as one process does."),
    ):
        found = Verification(module="M", strategies=(), mesh=(1, 2), cells=0, steps=1, rows=rows)
        assert found.ok is ok
        assert words in str(found)
        assert "? Cannot tell: one process by itself" in str(found)
        assert "1e-02    ?      encoders.hic." in str(found)
        assert found.to_dict()["rows"][0]["unclear"] == ["encoders.hic.first.bias"]
    broken = Row(quantity="loss", precision="float64", errors={"a": math.nan}, tolerances={"a": 1.0})
    assert not broken.ok
    culprit = Culprit(cause="unknown", where="", evidence="e", advice="a")
    found = Verification(
        module="M", strategies=(), mesh=(1, 2), cells=0, steps=1, rows=(row, broken), culprits=(culprit,)
    )
    assert found.to_dict()["rows"][1]["error"] == "nan"
    assert "an unknown number of samples" in " ".join(str(found).split())


@pytest.mark.ranks
def test_a_rank_that_gives_no_answer_is_told_with_where_it_stood(tmp_path: Path) -> None:
    with Workers(2, tmp_path, timeout=2) as pool:
        with pytest.raises(AmpError, match=r"^rank 1 gave no answer within 2 s") as told:
            pool.ranks(cases.waits_for_nobody)
        assert "rank 1 stood in" in str(told.value)
        assert "in waits_for_nobody" in str(told.value)
        assert "rank 0 stood in" not in str(told.value)
        with pytest.raises(AmpError, match="has not answered before"):
            pool.single(cases.waits_for_nobody)


class Inherited:
    """Says which process it was thrown away in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / f"thrown-away-{os.getpid()}").touch()


def test_a_session_that_has_a_process_group_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_file, "_is_interactive", lambda: True)
    monkeypatch.setattr(workers_file.dist, "is_initialized", lambda: True)
    with pytest.raises(AmpError, match=r"call torch\.distributed\.destroy_process_group\(\) first"):
        Workers(1, tmp_path, timeout=60).__enter__()


@pytest.mark.ranks
def test_a_forked_process_collects_no_garbage_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process group of the parent's would wait in its destructor for threads that a fork does not have."""
    monkeypatch.setattr(workers_file, "_is_interactive", lambda: True)
    gc.disable()
    try:
        Inherited(tmp_path)
        with Workers(1, tmp_path, timeout=60) as pool:
            pool.single(cases.collects)
        assert not list(tmp_path.glob("thrown-away-*"))
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
