"""Claim: on a mesh with a model axis, all of S1 to S5 train, log, save, resume and predict as one process does."""

from pathlib import Path
from typing import Any

import anndata
import cooler
import numpy as np
import pytest
import torch

from lightning_amp.data.prepare.synthetic import synthesize
from tests.lightning.strategy.model_axis_cases import ALL, CASE, CELLS, N_FEATURES, Maps, batches, everything
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

RUNS = ("1 x 2", "2 x 2")
RTOL = 1e-9
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model_axis")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    data_dir = folder / "data"
    synthesize(data_dir, cells=24, rna_cells=18, bins=30, strata=3, genes=20, seed=2)
    found: Runs = {}
    resume: dict[str, str] = {}
    for name, ranks in (("1 x 2", 2), ("one", 1), ("2 x 2", 4)):
        meet = folder / f"meet{ranks}"
        meet.mkdir()
        found[name] = run_ranks(everything, ranks, meet, data_dir, folder / name, resume, timeout=240)
        resume = {**resume, name: str(folder / name / "fit" / "epoch=1.ckpt")}
    return found


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], floor: float = 1e-12) -> None:
    assert list(found) == list(expected), "the same state"
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = (found[name] - value).double().norm()
        assert error <= RTOL * value.double().norm() + floor, f"{name}: off by {error:.1e}"


def all_fits(runs: Runs) -> list[tuple[str, dict[str, Any]]]:
    """Every run of the small module, whole or resumed, on every rank."""
    return [
        (f"{name}, {kind}, rank {rank}", found[kind])
        for name in runs
        for rank, found in enumerate(runs[name])
        for kind in found
        if kind == "fit" or kind.startswith("resumed")
    ]


def test_the_runs_are_what_the_claim_says(runs: Runs) -> None:
    for name, ranks in runs.items():
        for found in ranks:
            assert found["fit"]["strategies"] == (("S1",) if name == "one" else tuple(ALL.split(",")))
            mesh = found["fit"]["mesh"]
            assert f"{mesh.data} x {mesh.model}" == ("1 x 1" if name == "one" else name)


def test_clipped_and_accumulated_steps_are_those_of_one_process(runs: Runs) -> None:
    one = runs["one"][0]["fit"]
    for name in RUNS:
        for found in runs[name]:
            # summed over the cells of all ranks
            assert found["fit"]["losses"] == pytest.approx(one["losses"], rel=RTOL)
            assert found["fit"]["drawn"] == one["drawn"]
            close(found["fit"]["state"], one["state"])
    start = Maps().state_dict()
    moved = [name for name, value in one["state"].items() if (value - start[name]).abs().max() > 1e-2]
    assert {"encoder.0.weight", "decoder.strata.1.key.qk.weight", "v"} <= set(moved), "training must move these"


def test_a_checkpoint_resumes_on_any_mesh(runs: Runs) -> None:
    whole = runs["one"][0]["fit"]
    resumed = [(place, found) for place, found in all_fits(runs) if "resumed" in place]
    assert len(resumed) == 1 + 2 * 4
    for place, found in resumed:
        assert len(found["losses"]) == 2 * len(CELLS), place
        # draws go on anew after a restart, so the losses of a resumed run are compared with each other
        close(found["state"], resumed[0][1]["state"])
        assert found["state"].keys() == whole["state"].keys()


def test_checkpoints_hold_what_one_process_would_write(folder: Path, runs: Runs) -> None:
    for file in ("epoch=1.ckpt", "after.ckpt"):
        one = torch.load(folder / "one" / "fit" / file, weights_only=False)
        for name in RUNS:
            other = torch.load(folder / name / "fit" / file, weights_only=False)
            close(other["state_dict"], one["state_dict"])
            (mine,), (theirs,) = other["optimizer_states"], one["optimizer_states"]
            assert mine["param_groups"] == theirs["param_groups"]
            for index, state in theirs["state"].items():
                close(mine["state"][index], state)
    assert one["state_dict"]["encoder.0.weight"].shape == (CASE.dim, N_FEATURES)


def test_ranks_are_bitwise_equal(runs: Runs) -> None:
    for name in RUNS:
        first, *others = runs[name]
        for found in others:
            for kind in ("fit", "glue"):
                for key, value in first[kind]["state"].items():
                    assert torch.equal(found[kind]["state"][key], value), f"{name} {kind} {key}"


def test_after_a_fit_the_module_and_its_optimisers_are_whole(runs: Runs) -> None:
    for place, found in all_fits(runs):
        for claim in ("own again", "optimizers whole", "clipping back", "metrics back"):
            assert found[claim], f"{place}: {claim}"


def test_metrics_count_a_cell_once(runs: Runs) -> None:
    union = batches(None)
    library = torch.cat([batch["library"] for batch in union])
    expected = {
        "cells": sum(map(sum, CELLS)),
        "contacts": library.mean().item(),
        "library_sum": library.sum().item(),
        "library_mean": library.mean().item(),
    }
    for place, found in all_fits(runs):
        found = dict(found["metrics"])
        largest = found.pop("library_max")
        assert found == pytest.approx(expected, rel=RTOL), place
        assert largest > library.mean()
    for found in (f for ranks in runs.values() for f in ranks):
        assert found["fit"]["read"] == torch.cat([batch["index"] for batch in union]).tolist()


def test_the_reference_model_trains_as_on_one_process(runs: Runs) -> None:
    one = runs["one"][0]["glue"]
    for name in RUNS:
        for found in runs[name]:
            assert found["glue"]["losses"] == pytest.approx(one["losses"], rel=RTOL)
            assert found["glue"]["val_loss"] == pytest.approx(one["val_loss"], rel=RTOL)
            # biases in front of batch statistics have no gradient but rounding, which RMSprop scales up
            close(found["glue"]["state"], one["state"], floor=1e-8)


def test_predictions_are_those_of_one_process_and_written_once(folder: Path, runs: Runs) -> None:
    for name in RUNS:
        assert [bool(found["glue"]["predictions"]) for found in runs[name]] == [True] + [False] * (len(runs[name]) - 1)
        for modality in ("hic", "rna"):
            file = f"glue/predictions/embeddings_{modality}.h5ad"
            one, other = (anndata.read_h5ad(folder / run / file) for run in ("one", name))
            assert list(one.obs_names) == list(other.obs_names)
            np.testing.assert_allclose(other.obsm["X_amp"], one.obsm["X_amp"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(other.layers["imputed"], one.layers["imputed"], rtol=1e-5)
        assert other.uns["lightning_amp"]["ranks"] == len(runs[name])
        types = sorted((folder / "one" / "glue/predictions/pseudobulk").glob("*.cool"))
        assert types
        for path in types:
            one_map, other_map = (
                cooler.Cooler(str(path)),
                cooler.Cooler(str(folder / name / "glue/predictions/pseudobulk" / path.name)),
            )
            assert other_map.info["metadata"] == one_map.info["metadata"]
            np.testing.assert_allclose(other_map.matrix(balance=False)[:], one_map.matrix(balance=False)[:], rtol=1e-5)


def test_numbers_drawn_by_one_rank_alone_do_not_part_a_model_group(runs: Runs) -> None:
    found = [rank["disturbed"] for rank in runs["2 x 2"]]
    undisturbed = runs["2 x 2"][0]["fit"]["drawn"]
    assert found[0]["drawn"] == found[1]["drawn"] != undisturbed[: len(found[0]["drawn"])]
    assert found[2]["drawn"] == found[3]["drawn"]
    assert all(torch.equal(found[0]["state"][key], value) for key, value in found[1]["state"].items())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lbfgs", "InstallError: the optimizer 'LBFGS' was given 1 parameters that S2 splits over ranks"),
        ("batch", "DataError: the same batch is needed on the 2 ranks of a model group, found different ones"),
    ],
)
def test_what_would_train_wrongly_is_refused_on_every_rank(runs: Runs, name: str, text: str) -> None:
    for found in runs["1 x 2"]:
        assert text in found["refused"][name]


def test_a_run_that_ends_early_says_what_is_lost(runs: Runs) -> None:
    first, second = (found["interrupted"] for found in runs["1 x 2"])
    assert first["whole"]
    assert second["whole"]
    assert [first["lost columns"], second["lost columns"]] == [N_FEATURES // 2, N_FEATURES - N_FEATURES // 2]
    assert len(first["told"]) == 1
    assert "Load a checkpoint" in first["told"][0]
