"""Policy `paper` on real data: the loss curve of 2 and 4 ranks beside that of one process; the target is 1e-5.

    python -m benchmarks.same_curve FOLDER_WITH_THE_FILES [--out runs/same_curve] [--ranks 1 2 4]

Prepares the cortex data set of examples/cortex.py with few genes, so that all three signals are raised, and trains one
epoch with `lightning-amp fit` under policy `paper` and a memory budget that nothing fits into, so that the policy
prescribes S1 to S5 and puts all ranks on the model axis. One process trains without any of it. Double precision: in
single precision the rounding of sums in another order grows from step to step.
"""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "cortex.yaml"
TARGET = 1e-5


def amp(*words: str) -> None:
    """Run one `lightning-amp` command; one thread per rank, as many ranks share few cores."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "lightning_amp", *words], check=True, env=environment)


def prepare(files: Path, out: Path, genes: int) -> None:
    """Write the data directory."""
    amp(
        *("prepare", "--hic", str(files / "cortex_lee2019_chr1_1mb.scool")),
        *("--labels", str(files / "cortex_lee2019_ref.tsv")),
        *("--rna", str(files / "cortex_darmanis2015_rna.h5ad")),
        *("--genes", str(files / "hg19_genes.gtf.gz"), "--n-genes", str(genes)),
        *("--strata", "32", "--out", str(out / "data"), "--overwrite"),
    )


def curve(out: Path, ranks: int) -> list[float]:
    """Losses of all steps of one epoch on this many ranks."""
    folder = out / f"{ranks}_ranks"
    config = out / f"{ranks}_ranks.yaml"
    text = CONFIG.read_text().replace("runs/cortex/data", str(out / "data"))
    config.write_text(text.replace("runs/cortex", str(folder)))
    amp(
        *("fit", f"--config={config}", f"--trainer.devices={ranks}", "--trainer.max_epochs=1"),
        *("--trainer.strategy=lightning_amp.AMPStrategy", "--trainer.strategy.policy=paper"),
        *("--trainer.strategy.device_memory=1MiB", "--trainer.strategy.unfit=train"),
        "--trainer.precision=64-true",
        *("--trainer.log_every_n_steps=1", "--data.init_args.batch_size=64"),
    )
    newest = max(folder.glob("logs/version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    with newest.open() as rows:
        return [float(row["loss"]) for row in csv.DictReader(rows) if row.get("loss")]


def main() -> None:
    """Train with every number of ranks and print the largest difference from the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/same_curve"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--genes", type=int, default=500)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    prepare(arguments.files, arguments.out, arguments.genes)
    curves = {ranks: curve(arguments.out, ranks) for ranks in arguments.ranks}
    first = curves[arguments.ranks[0]]
    print(f"\n{'ranks':>5}  {'steps':>5}  {'first loss':>12}  {'last loss':>12}  {'difference':>10}")
    worst = 0.0
    for ranks, losses in curves.items():
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, first, strict=True))
        worst = max(worst, apart)
        print(f"{ranks:5d}  {len(losses):5d}  {losses[0]:12.8f}  {losses[-1]:12.8f}  {apart:10.1e}")
    print(f"largest relative difference {worst:.1e}, target {TARGET:.0e}")
    sys.exit(worst > TARGET)


if __name__ == "__main__":
    main()
