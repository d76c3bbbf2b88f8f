"""A report says of a run what is good and what is not: measures agree with scikit-learn's, and a small run has all."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from sklearn.metrics import adjusted_rand_score, silhouette_score

from lightning_amp.cli.main import main
from lightning_amp.data.files.strata_layout import StratumLayout
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError, ModelError
from lightning_amp.models.glue import GLUE
from lightning_amp.report.find_run import find_run
from lightning_amp.report.measures import (
    adjusted_rand,
    by_distance,
    cluster,
    components_of_counts,
    other_label_shares,
    same_label_share,
    silhouette,
    standardised,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning"),
]


def test_measures_agree_with_those_of_others() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(["a", "b", "c", "alone"], [20, 15, 5, 1])
    points = rng.normal(size=(41, 3)) + 2 * np.array(["abc".find(x[0]) for x in labels])[:, None]
    found = cluster(points, 3)
    assert adjusted_rand(found, labels) == pytest.approx(adjusted_rand_score(found, labels))
    assert adjusted_rand(labels, labels) == 1.0
    assert silhouette(points, labels) == pytest.approx(silhouette_score(points, labels))
    share, chance = same_label_share(points, np.repeat(["x", "y"], [40, 1]))
    assert share > 0.9
    assert chance == pytest.approx(40 * 39 / 40 / 41)
    # 16 points in one place and 20 far from them and from each other, whose nearest are the 16
    place = np.concatenate([np.zeros((16, 20)), 10 * np.eye(20)])
    shares = other_label_shares(place, np.repeat(["in", "out"], [16, 20]))
    assert shares == {"in": (0.0, 20 / 35), "out": (1.0, 16 / 35)}
    counts = rng.poisson(5.0, (12, 30)).astype(float)
    x = np.log1p(counts * np.median(counts.sum(1)) / counts.sum(1, keepdims=True))
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    np.testing.assert_allclose(np.abs(components_of_counts(counts)[:, :5]), np.abs(u * s)[:, :5], atol=1e-9)


def test_maps_are_compared_at_the_same_distance() -> None:
    strata = [StratumLayout(k, None, *span, np.arange(span[1] - span[0])) for k, span in enumerate([(0, 4), (4, 7)])]
    one = np.array([9.0, 8, 7, 6, 3, 2, 1])
    np.testing.assert_array_equal(by_distance(one, strata), [30, 6])
    # the same but for the decay
    other = np.concatenate([one[:4] * 10, one[4:] + 5])
    assert standardised(one, strata) @ standardised(other, strata) == pytest.approx(1.0)
    assert np.isfinite(standardised(np.ones(7), strata)).all()


@pytest.mark.long
def test_a_run_of_python_and_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    synthesize(data, cells=24, rna_cells=20, bins=24, strata=4, genes=30, cell_types=2)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    torch.manual_seed(0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=2, logger=False, accelerator="cpu", default_root_dir=tmp_path, **quiet)  # type: ignore[arg-type]
    trainer.fit(GLUE(latent_dim=4, hidden_dim=8, window=4), SingleCellDataModule(data, batch_size=8))
    trainer.save_checkpoint(run / "checkpoints" / "last.ckpt", weights_only=False)
    capsys.readouterr()
    with pytest.raises(DataError, match="no config_used.yaml of `lightning-amp fit` names its data"):
        find_run(run)
    assert main(["report", str(run), "--data", str(data)]) == 0
    said = capsys.readouterr().out
    pictures = ["losses", "embedding", "decay", "maps"]
    for path in [*(f"{name}.png" for name in pictures), "report.md", "report.json"]:
        assert (run / "report" / path).stat().st_size > 500, path
        assert f"wrote {run / 'report' / path}" in said
    checks = {check["what"]: check for check in json.loads((run / "report" / "report.json").read_text())}
    expected = {"val_loss, last 1 epochs", "adversary", "other modality: neighbours, same type"}
    expected |= {f"{name}: neighbours, other modality" for name in ("hic", "rna")}
    expected |= {"expected / measured, worst", "maps nearest to own type's sum"}
    expected |= {
        f"{m}: {what}" for m in ("hic", "rna") for what in ("ARI of clusters and types", "silhouette of types")
    }
    assert expected <= set(checks)
    # the command line's configuration names the data and the folder of checkpoints
    logs = tmp_path / "logs" / "version_0"
    logs.mkdir(parents=True)
    (logs / "config_used.yaml").write_text(
        f"trainer: {{callbacks: [{{class_path: x, init_args: {{dirpath: {run / 'checkpoints'}}}}}]}}\n"
        f"data: {{class_path: lightning_amp.SingleCellDataModule, init_args: {{data_dir: {data}}}}}\n"
    )
    # that of a later `predict --data NEW` does not
    later = tmp_path / "logs" / "version_1"
    later.mkdir()
    (later / "config_used.yaml").write_text("data: {init_args: {data_dir: new}}\nreturn_predictions: false\n")
    found = find_run(logs.parent)
    assert (found.checkpoint, found.data) == (run / "checkpoints" / "last.ckpt", {"data_dir": str(data)})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="found a folder without a checkpoint"):
        find_run(tmp_path / "empty")
