"""Claim: on a mesh of two data ranks and two model ranks, all of S1 to S5 train, log and predict as one process does.

Checkpoints of this mesh are in tests/lightning/checkpoints/test_resume.py.
"""

from pathlib import Path
from typing import Any

import anndata
import cooler
import numpy as np
import pytest
import torch

from lightning_amp.data.prepare.synthetic import synthesize
from tests.lightning.strategy.model_axis_cases import ALL, CELLS, N_FEATURES, Maps, batches, everything
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

RTOL = 1e-9
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model_axis")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    data_dir, found = folder / "data", {}
    synthesize(data_dir, cells=24, rna_cells=18, bins=30, strata=3, genes=20, seed=2)
    for name, ranks in (("one", 1), ("mesh", 4)):
        (folder / name).mkdir()
        found[name] = run_ranks(everything, ranks, folder / name, data_dir, folder / name, timeout=240)
    return found


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], floor: float = 1e-12) -> None:
    assert list(found) == list(expected), "the same state"
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = (found[name] - value).double().norm()
        assert error <= RTOL * value.double().norm() + floor, f"{name}: off by {error:.1e}"


@pytest.mark.full
def test_clipped_and_accumulated_steps_are_those_of_one_process(runs: Runs) -> None:
    (one,) = (found["fit"] for found in runs["one"])
    assert one["plan"] == (("S1",), 1, 1)
    for found in (rank["fit"] for rank in runs["mesh"]):
        assert found["plan"] == (tuple(ALL.split(",")), 2, 2)
        # summed over the cells of all ranks
        assert found["losses"] == pytest.approx(one["losses"], rel=RTOL)
        assert found["drawn"] == one["drawn"]
        close(found["state"], one["state"])
        for claim in ("own again", "optimizers whole", "clipping back", "metrics back"):
            assert found[claim], claim
    start = Maps().state_dict()
    moved = [name for name, value in one["state"].items() if (value - start[name]).abs().max() > 1e-2]
    assert {"encoder.0.weight", "decoder.strata.1.key.qk.weight", "v"} <= set(moved), "training must move these"


def test_ranks_are_bitwise_equal(runs: Runs) -> None:
    first, *others = runs["mesh"]
    for found in others:
        for kind in ("fit", "glue"):
            for key, value in first[kind]["state"].items():
                assert torch.equal(found[kind]["state"][key], value), f"{kind} {key}"


def test_metrics_count_a_cell_once(runs: Runs) -> None:
    union = batches(None)
    library = torch.cat([batch["library"] for batch in union])
    expected = {
        "cells": sum(map(sum, CELLS)),
        "contacts": library.mean().item(),
        "library_sum": library.sum().item(),
        "library_mean": library.mean().item(),
    }
    for found in (rank["fit"] for ranks in runs.values() for rank in ranks):
        assert found["metrics"].pop("library_max") > library.mean()
        assert found["metrics"] == pytest.approx(expected, rel=RTOL)
        assert found["read"] == torch.cat([batch["index"] for batch in union]).tolist()


def test_the_reference_model_trains_as_on_one_process(runs: Runs) -> None:
    one = runs["one"][0]["glue"]
    for found in runs["mesh"]:
        assert found["glue"]["losses"] == pytest.approx(one["losses"], rel=RTOL)
        assert found["glue"]["val_loss"] == pytest.approx(one["val_loss"], rel=RTOL)
        # biases in front of batch statistics have no gradient but rounding, which RMSprop scales up
        close(found["glue"]["state"], one["state"], floor=1e-8)


def test_predictions_are_those_of_one_process_and_written_once(folder: Path, runs: Runs) -> None:
    assert [bool(found["glue"]["predictions"]) for found in runs["mesh"]] == [True, False, False, False]
    written, expected = (folder / name / "predictions" for name in ("mesh", "one"))
    for modality in ("hic", "rna"):
        one, other = (anndata.read_h5ad(at / f"embeddings_{modality}.h5ad") for at in (expected, written))
        assert list(one.obs_names) == list(other.obs_names)
        np.testing.assert_allclose(other.obsm["X_amp"], one.obsm["X_amp"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(other.layers["imputed"], one.layers["imputed"], rtol=1e-5)
    assert other.uns["lightning_amp"]["ranks"] == 4
    types = sorted((expected / "pseudobulk").glob("*.cool"))
    assert types
    for path in types:
        one_map, other_map = (cooler.Cooler(str(at / "pseudobulk" / path.name)) for at in (expected, written))
        assert other_map.info["metadata"] == one_map.info["metadata"]
        np.testing.assert_allclose(other_map.matrix(balance=False)[:], one_map.matrix(balance=False)[:], rtol=1e-5)


def test_numbers_drawn_by_one_rank_alone_do_not_part_a_model_group(runs: Runs) -> None:
    found = [rank["disturbed"] for rank in runs["mesh"]]
    undisturbed = runs["mesh"][0]["fit"]["drawn"]
    assert found[0]["drawn"] == found[1]["drawn"] != undisturbed[: len(found[0]["drawn"])]
    assert found[2]["drawn"] == found[3]["drawn"]
    assert all(torch.equal(found[0]["state"][key], value) for key, value in found[1]["state"].items())


def test_a_run_that_ends_early_says_what_is_lost(runs: Runs) -> None:
    found = [rank["interrupted"] for rank in runs["mesh"]]
    assert all(one["whole"] for one in found)
    assert [one["lost columns"] for one in found] == [N_FEATURES // 2, N_FEATURES - N_FEATURES // 2] * 2
    (told,) = found[0]["told"]
    assert "Load a checkpoint" in told
