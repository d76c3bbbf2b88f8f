"""Real single-cell Hi-C and RNA of the human cortex, from files to embeddings: prepare, plan, fit, predict, score.

    python examples/cortex.py FOLDER_WITH_THE_FILES [--out runs/cortex] [--devices 2] [--epochs 30]

The files are named in docs/quickstart.md. The score is the accuracy of a logistic regression from the Hi-C embedding to
the four cell types, in 5 folds; the PCA of the counts and the sequencing depth alone are scored beside it.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import anndata
import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "cortex.yaml"


def amp(*words: str) -> None:
    """Run one `lightning-amp` command and show it."""
    print(f"\n$ lightning-amp {' '.join(words)}\n", flush=True)
    subprocess.run([sys.executable, "-m", "lightning_amp", *words], check=True)


def train(files: Path, out: Path, *, devices: int, epochs: int, batch_size: int) -> Path:
    """Prepare, plan, fit and predict; returns the h5ad with the Hi-C embedding."""
    data = out / "data"
    amp(
        *("prepare", "--hic", str(files / "cortex_lee2019_chr1_1mb.scool")),
        *("--labels", str(files / "cortex_lee2019_ref.tsv")),
        *("--rna", str(files / "cortex_darmanis2015_rna.h5ad")),
        *("--genes", str(files / "hg19_genes.gtf.gz")),
        *("--strata", "32", "--out", str(data), "--overwrite"),
    )
    amp("plan", str(data), "--devices", str(devices), "--device-memory", "8GiB", "--window", "25")
    config = out / "config.yaml"
    config.write_text(CONFIG.read_text().replace("runs/cortex", str(out)))
    settings = [
        f"--config={config}",
        f"--data.init_args.batch_size={batch_size}",
        f"--trainer.devices={devices}",
        f"--trainer.max_epochs={epochs}",
    ]
    amp("fit", *settings)
    amp("predict", *settings, "--ckpt_path", str(out / "checkpoints" / "last.ckpt"), "--return_predictions=false")
    return out / "predictions" / "embeddings_hic.h5ad"


def accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Mean accuracy of 5-fold logistic regression."""
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return float(cross_val_score(model, features, labels, cv=folds).mean())


def score(embedding: Path, hic: Path) -> dict[str, float]:
    """Accuracy from the embedding, from the PCA of the counts, and from the depth alone."""
    cells, counts = anndata.read_h5ad(embedding), anndata.read_h5ad(hic)
    labels = cells.obs["celltype"].to_numpy().astype(str)
    x = np.asarray(counts.X.todense())
    depth = x.sum(axis=1, keepdims=True)
    pca = PCA(20, random_state=0).fit_transform(np.log1p(1e4 * x / depth))
    return {
        "embedding": accuracy(cells.obsm["X_amp"], labels),
        "PCA of the counts": accuracy(pca, labels),
        "depth alone": accuracy(np.log(depth), labels),
    }


def main() -> None:
    """Read the arguments, train and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/cortex"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="cells per rank")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    embedding = train(
        arguments.files,
        arguments.out,
        devices=arguments.devices,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
    )
    (hic,) = (arguments.out / "data" / "hic").glob("*.h5ad")
    for name, value in score(embedding, hic).items():
        print(f"{name:20s} {value:.3f}")


if __name__ == "__main__":
    main()
