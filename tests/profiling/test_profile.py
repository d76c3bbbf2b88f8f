"""Claim: a profile states what the files hold, read from headers and index columns only."""

import json
import shutil
import subprocess
import sys

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from lightning_amp.data.files.directory import find
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError
from lightning_amp.planning.reports.plan_report import profile_report
from lightning_amp.profiling.read_profile import profile


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "data"
    synthesize(out, cells=30, bins=40, strata=4, genes=25, seed=1)
    return out


def write(path, matrix, **columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    obs = pd.DataFrame(columns, index=[f"cell{i}" for i in range(matrix.shape[0])])
    var = pd.DataFrame(index=[f"feature{i}" for i in range(matrix.shape[1])])
    anndata.AnnData(matrix, obs=obs, var=var).write_h5ad(path)


def test_sizes_agree_with_the_files(data_dir) -> None:
    made = profile(data_dir)
    hic, rna = made.modality("hic"), made.modality("rna")
    file = anndata.read_h5ad(data_dir / hic.file)
    assert (hic.cells, hic.features) == file.shape
    assert hic.nonzero == file.X.nnz
    assert hic.zeros == pytest.approx(1 - file.X.nnz / np.prod(file.shape))
    assert hic.scale == pytest.approx(hic.features / rna.features)
    assert hic.decomposition.strata == 4
    assert hic.decomposition.anchors == hic.decomposition.features[0]
    assert sum(hic.decomposition.features) == hic.features
    assert (hic.probability_model, rna.probability_model) == ("HiCZINB", "NB")
    counts = np.asarray(file.X.sum(axis=1))
    assert hic.contact_spread == pytest.approx(counts.std() / counts.mean(), rel=1e-6)
    assert hic.batches == file.obs["batch"].nunique()
    assert made.graph.vertices == hic.decomposition.anchors + rna.features
    assert json.loads(json.dumps(made.to_dict()))["modalities"][0]["decomposition"]["strata"] == 4


def test_attention_follows_the_strata_unless_told(data_dir) -> None:
    assert profile(data_dir).modality("hic").decomposition.attention
    assert not profile(data_dir, attention=False).modality("hic").decomposition.attention


def test_every_modality_has_its_probability_model(tmp_path) -> None:
    counts = sparse.csr_matrix(np.eye(4, 6, dtype=np.float32))
    for name in ("rna", "atac", "methyl"):
        write(tmp_path / name / f"{name}.h5ad", counts)
    models = {m.name: m.probability_model for m in profile(tmp_path).modalities}
    assert models == {"atac": "ZINB", "methyl": "ZILN", "rna": "NB"}
    assert profile(tmp_path).graph is None
    assert profile(tmp_path).modality("hic") is None


def test_rna_that_is_dense_and_has_no_counts_is_normal(tmp_path) -> None:
    write(tmp_path / "rna" / "rna.h5ad", np.random.default_rng(0).normal(size=(4, 6)))
    rna = profile(tmp_path).modality("rna")
    assert rna.probability_model == "Normal"
    assert rna.zeros is None
    assert rna.contact_spread is None


def test_a_missing_directory_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match="absent"):
        profile(tmp_path / "absent")


@pytest.mark.long
def test_a_profile_and_a_plan_print_as_reports_in_a_new_process(data_dir) -> None:
    code = (
        "import lightning_amp; profile = lightning_amp.profile('.'); print(profile);"
        "print(lightning_amp.plan(profile, device_memory='24GiB', batch_size=4))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=data_dir, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("Profile of .\n"), run.stdout
    assert "\nPlan (policy auto): " in run.stdout


@pytest.mark.long
def test_a_profile_needs_no_torch(data_dir) -> None:
    # anndata 0.11 imports torch wherever it is installed, so that the test hides it
    code = (
        "import sys; sys.modules['torch'] = None; from lightning_amp.cli.main import main;"
        f"sys.exit(main(['profile', {str(data_dir)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Profile of ")


def test_modalities_that_are_not_known_are_named_and_not_read(data_dir, tmp_path) -> None:
    assert profile(data_dir).unread == ()
    copied = shutil.copytree(data_dir, tmp_path / "data")
    (copied / "spatial").mkdir()
    (copied / "spatial" / "spots.h5ad").write_text("no HDF5")
    made = profile(copied)
    assert made.unread == ("spatial/spots.h5ad",)
    assert made.modalities == profile(data_dir).modalities
    assert "not read, because its modality is none of hic, rna, atac, methyl:\nspatial/spots.h5ad" in profile_report(
        made
    )
    assert json.loads(json.dumps(made.to_dict()))["unread"] == ["spatial/spots.h5ad"]
    alone = shutil.copytree(copied / "spatial", tmp_path / "alone" / "spatial").parent
    assert "no modality that is known" in profile_report(profile(alone))
    with pytest.raises(DataError, match="no modality found"):
        find(alone)
