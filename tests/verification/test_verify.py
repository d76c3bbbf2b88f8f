"""Claim: verify finds clean models equal, and names suspects in those that are not."""

import gc
import importlib
import io
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.cli.commands.verify import _decided
from lightning_amp.cli.main import main
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import AmpError, DataError, PlanError
from lightning_amp.models.glue import GLUE
from lightning_amp.verification import training_run as cut
from lightning_amp.verification import verify as processes
from lightning_amp.verification.compare import Precision, Report, errors, find_suspects, loss_errors
from lightning_amp.verification.result import Row, Suspect, Verification
from lightning_amp.verification.verify import run_processes
from tests.verification import verify_cases as cases
from tests.verification.verify_cases import EXAMPLES, cells, verified

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


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "data"
    synthesize(out, cells=30, rna_cells=30, bins=24, strata=3, genes=20, seed=2)
    return out


CLEAN = {
    "even": (cases.Clean, cells(8)),
    "uneven": (cases.Clean, cells(7)),
    "edges": (cases.EdgesDrawn, cells(8)),
    "amplified": (cases.Amplified, cells(8)),
    "as advised": (cases.MaskedOverRanks, cells(8)),
    "modalities": (cases.Modalities, {"a": cells(8), "b": cells(6)}),
    "scale of all ranks' cells": (lambda: cases.Scaled(cases.SharedScale()), cells(7)),
    "plain tensor": (cases.Inline, torch.ones(4, 3)),
}


@pytest.mark.ranks
@pytest.mark.long
def test_clean_modules_are_equal_and_have_no_suspects(tmp_path: Path) -> None:
    cases_of: dict[str, cases.Case] = {name: (module(), batch, {}) for name, (module, batch) in CLEAN.items()}
    both = {"both precisions": (cases.Adversarial(), cells(7), {})}
    cases_of |= both
    results = verified(tmp_path, {name: cases_of[name] for name in CLEAN})
    results |= verified(tmp_path, both, precisions=("float32", "float64"))
    for name, found in results.items():
        assert found.ok, (name, str(found))
        assert {one.suspect for one in found.suspects} <= {"rounding"}, name
        assert "The ranks train as one process does." in str(found)
        rows = {row.quantity: row for row in found.rows if row.precision == "float64"}
        first, after = "gradients, step 1", "parameters after 2 steps"
        assert {"loss, step 1", first, "loss, later steps", after} <= set(rows), name
        names = {name for name, _ in cases_of[name][0].named_parameters()}
        assert set(rows[first].errors) == set(rows[after].errors) == names
        if name == "amplified":
            assert 1e-9 < rows[after].error < 1e-6


LOSS = "the loss in training_step"
DROPOUT = "middle (Dropout); training_step, torch.random"
DRAWN = [("random draws", "training_step, torch.random"), ("mean of means", LOSS)]
SCALE = "encoder.0.mean; encoder.0.scale"
OWN = {"share_batch_statistics": False}
SUSPECTS: dict[str, tuple[cases.Case, list[tuple[str, str]]]] = {
    "dropout": ((cases.Clean(nn.Dropout(0.5)), cells(8), {}), [("random draws", DROPOUT)]),
    "attention": (
        (cases.Attends(), cells(8), {}),
        [("random draws", "attention (MultiheadAttention); training_step, torch.random")],
    ),
    "draws": ((cases.Samples(), cells(8), {}), DRAWN),
    "uneven draws": ((cases.Samples(), cells(5), {}), DRAWN),
    "mask": ((cases.Masked(), cells(8), {}), [("mean of means", LOSS)]),
    "uneven mask": ((cases.Masked(), cells(7), {}), [("mean of means", LOSS)]),
    "sum": ((cases.Summed(), cells(8), {}), [("sum over samples", LOSS)]),
    "reads others": ((cases.Clean(cases.Centred()), cells(8), {}), [("mean of means", LOSS)]),
    "not shared": ((cases.Clean(), cells(8), OWN), [("batch statistics", "encoder.1")]),
    "three at once": (
        (cases.Masked(nn.Dropout(0.5)), cells(8), OWN),
        [("random draws", DROPOUT), ("batch statistics", "encoder.1")],
    ),
    "modalities": ((cases.Modalities(), {"a": cells(8), "b": cells(7)}, {}), [("unequal parts", LOSS)]),
    "buffer": ((cases.Centre(), cells(8), {}), [("buffers", "centre")]),
    "scale": ((cases.Scaled(cases.RunningScale()), cells(8), {}), [("buffers", SCALE)]),
    "late scale": ((cases.Scaled(cases.RunningScale(late=True)), cells(7), {}), [("buffers", SCALE)]),
    "rank": (
        (cases.ByRank(), cells(8), {}),
        [("random draws", "training_step, numpy.random"), ("mean of means", LOSS)],
    ),
    "late": ((cases.Late(), cells(8), {}), [("mean of means", LOSS)]),
    "not finite": ((cases.NotFinite(), cells(8), {}), [("not finite", "loss, step 1, float64")]),
}


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.long
def test_suspects_are_named_and_nothing_else_is(tmp_path: Path) -> None:
    for name, found in verified(tmp_path, {name: case for name, (case, *_) in SUSPECTS.items()}).items():
        _, suspects = SUSPECTS[name]
        assert not found.ok, name
        assert [(one.suspect, one.where) for one in found.suspects] == suspects, name
        assert "The ranks do not train as one process does." in str(found)


def test_what_is_seen_in_single_precision_alone_may_be_rounding() -> None:
    def suspects(quantity: str, *precisions: Precision) -> list[str]:
        errors = {"gradients": {"x": 1e-3}}
        reports = [
            Report(
                precision=precision, place=(0, 2), losses=[[1.0]], one_losses=[[1.0]], all_cells=8,
                errors=errors, factor=None, draws=[], differing_buffers=[], unshared=[], uneven=False,
                strategies=(), mesh=(2, 1),
            )
            for precision in precisions
        ]  # fmt: skip
        row = Row(quantity=quantity, precision=precisions[0], errors={"x": 1e-3}, allowed=1e-4)
        return [one.suspect for one in find_suspects([row], reports)]

    assert suspects("gradients, step 1", "float32", "float64") == ["rounding"]
    assert suspects("gradients, step 1", "float32") == ["mean of means", "rounding"]
    assert suspects("gradients, step 1", "float64") == ["mean of means"]
    assert suspects("parameters after 1 step", "float64") == ["unknown"]
    assert suspects("buffers after 1 step", "float64") == ["buffers"]


REFERENCE: dict[str, tuple[Any, tuple[int, int], int]] = {
    "S1,S2,S3,S4,S5": ("attention", (1, 2), 5),
    "S1,S3,stream": ("attention", (2, 1), 7),
    "S1,S4,nodes,stream": ("full_attention", (1, 2), 5),
}


@pytest.mark.ranks
@pytest.mark.long
def test_the_reference_model_is_equal(data_dir: Path, tmp_path: Path) -> None:
    """Ranks of a model group read the same cells; draws of the others are keyed by the cell."""
    given: dict[str, cases.Case] = {}
    for strategies, (key, mesh, n) in REFERENCE.items():
        window = 8 if key == "attention" else None
        model = GLUE(latent_dim=8, hidden_dim=16, key=key, window=window, edges_per_step=64)
        options = {"strategies": strategies, "model_parallel_size": mesh[1]}
        given[strategies] = model, SingleCellDataModule(data_dir, batch_size=n), options
    for strategies, found in verified(tmp_path, given).items():
        _, mesh, n = REFERENCE[strategies]
        assert found.ok, str(found)
        assert (found.mesh, found.cells, set(found.strategies)) == (mesh, n, set(strategies.split(",")))


@pytest.mark.ranks
@pytest.mark.long
def test_what_a_rank_raises_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    # quicker than to spawn
    monkeypatch.setattr(processes, "_is_interactive", lambda: True)
    verify = partial(lightning_amp.verify, steps=1, precisions=["float64"])
    with pytest.raises(AmpError, match=r"in rank [01] ArithmeticError was raised: on purpose(?s:.*)training_step"):
        verify(cases.RaisesOnRank(), cells(8))
    with pytest.raises(DataError, match=r"a batch of 1 samples cannot be split over 2 data ranks"):
        verify(cases.Inline(), torch.ones(1, 3))
    with pytest.raises(PlanError, match=r"S5 requires a decoder of strata"):
        verify(cases.Inline(), torch.ones(4, 3), strategies="S1,S5", model_parallel_size=2)


@pytest.mark.exhaustive
@pytest.mark.release
def test_the_command_reads_the_configuration_of_fit(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.substitute(data=data_dir, share="false"))
    words = ["verify", "--config", str(config), "--precision", "float64", "--steps", "2", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_amp", *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["strategies"], found["mesh"], found["cells"]) == (["S1", "S3"], [2, 1], 12)
    assert {one["suspect"] for one in found["suspects"]} == {"batch statistics"}
    assert found["schema"] == 3
    assert main(["verify", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml'; give the YAML of" in capsys.readouterr().err


def test_another_plan_than_the_configurations_leaves_out_how_that_is_done() -> None:
    options = {"strategies": "fsdp", "fsdp_ranks": 2, "micro_batches": None, "device_memory": "1GiB"}
    asked = Namespace(policy=None, strategies=None, plan=None, model_parallel_size=None)
    assert _decided(options, asked) == options
    # another size is one of the same techniques: they had been left out, and the policy's plan was verified
    asked.model_parallel_size = 2
    assert _decided(options, asked) == {**options, "model_parallel_size": 2}
    asked.model_parallel_size, asked.strategies = None, "S1"
    assert _decided(options, asked) == {"device_memory": "1GiB", "strategies": "S1"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, r"devices=0 is not supported"),
        ({"steps": 1.5}, r"steps=1.5 is not supported"),
        ({"precisions": ["bf16"]}, r"precisions=\['bf16'\] is not supported"),
        ({"policy": "best"}, r"policy='best'"),
    ],
)
def test_requests_are_checked_before_anything_starts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        lightning_amp.verify(cases.Clean(), cells(8), **options)


def test_what_cannot_be_sent_or_read_is_refused_before_anything_starts() -> None:
    module = cases.Clean()
    module.scale = lambda x: x
    with pytest.raises(AmpError, match=r"Clean and its data to other processes, because they cannot be pickled"):
        lightning_amp.verify(module, cells(8))
    with pytest.raises(DataError, match=r"a loader without batches"):
        lightning_amp.verify(cases.Clean(), DataLoader([]))


def test_batches_of_several_loaders_are_those_of_training() -> None:
    one, two = DataLoader(range(4), batch_size=2), DataLoader(range(10, 13), batch_size=1)
    both = {"a": one, "b": two}
    for given, last in ((both, 12), (CombinedLoader(both, "min_size"), 10)):
        _, batches = torch.load(io.BytesIO(processes.subject_of(cases.Clean(), given, 3)), weights_only=False)
        found = [(batch["a"].tolist(), batch["b"].tolist()) for batch in batches]
        assert found == [([0, 1], [10]), ([2, 3], [11]), ([0, 1], [last])]
    assert [batch.tolist() for batch in cut.first_of(CombinedLoader(one), 3)] == [[0, 1], [2, 3], [0, 1]]


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
    assert cut.converted(batch, torch.float64)["b"]["x"].dtype is torch.float64
    assert cut.converted(batch, torch.float64)["a"]["x"].dtype is sparse.dtype
    with pytest.raises(DataError, match=r"have the first axes \[4, 7\]"):
        cut.part_of([dense, dense[:4]], 0, 2)
    assert len(cut.part_of([dense, dense[:4]], 0, 1)) == 2


def test_errors_are_relative_and_nothing_is_passed_over() -> None:
    one = {"a": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([1e-20])}
    found = {"a": torch.tensor([3.0, 4.5]), "tiny": torch.tensor([2e-20])}
    assert errors(found, one) == pytest.approx({"a": 0.1, "tiny": 2e-19}, rel=1e-6)
    assert errors({"a": one["a"]}, one)["tiny"] == math.inf
    assert errors(one, {"a": one["a"]})["tiny"] == math.inf
    assert errors({"a": one["a"][:1]}, {"a": one["a"]})["a"] == math.inf
    assert math.isnan(errors({"a": one["a"] / 0 * 0}, {"a": one["a"]})["a"])
    mask = torch.full((2, 2), -math.inf).triu(1)
    assert errors({"mask": mask, "a": 2 * one["a"]}, {"mask": mask, "a": one["a"]}) == {"mask": 0.0, "a": 1.0}
    assert errors({"z": torch.tensor([3j])}, {"z": torch.tensor([2j])}) == {"z": 0.5}
    assert loss_errors([[1.0], [3.0]], [[1.0], [2.0]]) == {"step 1": 0.0, "step 2": 0.5}
    assert math.isnan(loss_errors([[1.0]], [[1.0, 2.0]])["step 1, backward 2"])
    assert math.isnan(loss_errors([[math.inf]], [[math.inf]])["step 1"])


def test_a_row_is_as_good_as_its_worst_tensor() -> None:
    row = Row(quantity="gradients", precision="float64", errors={"a": 1e-3, "b": 1e-6}, allowed=1e-5)
    assert (row.worst, row.error, row.ok, row.wrong) == ("a", 1e-3, False, ["a"])
    rounded = Row(quantity="gradients", precision="float32", errors={"a": 1e-3}, allowed=1e-4)
    equal = Row(quantity="gradients", precision="float64", errors={"a": 0.0}, allowed=1e-9)
    for rows, ok, words in (
        ((rounded, equal), True, "The ranks train as one process does."),
        ((rounded,), False, "The ranks do not train as one process does."),
        ((rounded, row), False, "The ranks do not train as one process does."),
    ):
        found = Verification(module="M", strategies=(), mesh=(1, 2), cells=0, steps=1, rows=rows)
        assert found.ok is ok
        assert words in str(found)
    broken = Row(quantity="loss", precision="float64", errors={"a": math.nan}, allowed=1.0)
    assert not broken.ok
    suspect = Suspect(suspect="unknown", why="w", advice="a").at(list("vwxyz"))
    assert suspect.where == "v; w; x; y and 1 more"
    found = Verification(
        module="M", strategies=(), mesh=(1, 2), cells=0, steps=1, rows=(row, broken), suspects=(suspect,)
    )
    assert found.to_dict()["rows"][1]["error"] == "nan"
    assert "an unknown number of samples" in " ".join(str(found).split())


@pytest.mark.ranks
def test_a_rank_that_gives_no_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_is_interactive", lambda: True)
    with pytest.raises(AmpError, match=r"^rank 1 did not answer within 2 s; if steps take long"):
        run_processes(cases.waits_for_nobody, 2, tmp_path, timeout=2)
    with pytest.raises(AmpError, match=r"^rank 1 ended without a message"):
        run_processes(cases.ends, 2, tmp_path, timeout=60)


class Inherited:
    """Says which process it was thrown away in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / f"thrown-away-{os.getpid()}").touch()


def test_a_session_that_has_a_process_group_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_is_interactive", lambda: True)
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    with pytest.raises(AmpError, match=r"call torch\.distributed\.destroy_process_group\(\) first"):
        run_processes(cases.collects, 1, tmp_path, timeout=60)


@pytest.mark.ranks
def test_a_forked_process_collects_no_garbage_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group of the parent's would wait in its destructor for threads that a fork does not have."""
    monkeypatch.setattr(processes, "_is_interactive", lambda: True)
    gc.disable()
    try:
        Inherited(tmp_path)
        run_processes(cases.collects, 1, tmp_path, timeout=60)
        assert not list(tmp_path.glob("thrown-away-*"))
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.long
def test_examples_are_equal_and_random_draws_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    transformer, unet = importlib.import_module("gene_transformer"), importlib.import_module("unet")
    torch.manual_seed(0)
    batch = transformer.make_batch(6, 14)
    equal = {
        strategies: (transformer.GeneTransformer(dim=16, layers=2, dropout=0.0), batch, {"strategies": strategies})
        for strategies in ("S1,recompute", "S1,fsdp", "S1,recompute,fsdp")
    }
    drawing = {
        "dropout": (
            transformer.GeneTransformer(dim=16, layers=2, dropout=0.1),
            batch,
            {"strategies": "S1,recompute,fsdp"},
        ),
        "manual optimisation with noise": (unet.UNet(channels=8), unet.make_batch(4, 8), {"strategies": "S1,fsdp"}),
    }
    for name, found in verified(tmp_path, equal | drawing).items():
        if name in equal:
            assert found.ok, str(found)
            assert found.strategies == tuple(name.split(","))
            quantities = {row.quantity for row in found.rows}
            assert {"gradients, step 1", "parameters after 2 steps"} <= quantities
        else:
            assert found.suspects[0].suspect == "random draws", name
            assert name != "dropout" or "blocks.0 (Block)" in found.suspects[0].where
