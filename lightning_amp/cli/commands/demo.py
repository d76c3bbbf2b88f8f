"""`lightning-amp demo`: make synthetic data, plan, train and predict, by the commands that a user would type."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

from lightning_amp.errors import AmpError, DataError

MARK = ".lightning-amp-demo"

SYNTHETIC = {"cells": 240, "strata": 12, "depth": 6000}

CONFIG = Template("""\
# lightning-amp fit --config $out/config.yaml
seed_everything: 0
trainer:
  strategy: amp
  accelerator: cpu
  devices: $devices
  max_epochs: $epochs
  log_every_n_steps: 2
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: $out, name: logs}
  callbacks:
    - class_path: lightning_amp.StratumMemoryMonitor
      init_args: {dirpath: $out/memory, every_n_steps: 30}
    - class_path: lightning_amp.PredictionWriter
      init_args: {out_dir: $out/predictions, celltype_key: celltype, impute_rna: true}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: $out/checkpoints, filename: last, enable_version_counter: false}
model:
  class_path: lightning_amp.GLUE
  init_args: {latent_dim: 32, window: 20, lr: 0.01, hidden_depth: 1, lam_graph: 0.02, lam_align: 0.1}
data:
  class_path: lightning_amp.SingleCellDataModule
  init_args: {data_dir: $out/data, batch_size: 16}
""")


BEFORE_FIT = (
    "The plan is made again, now of the module itself, which has fewer hidden layers than the usual one, and for",
    "the memory that this machine has: sizes differ a little from those above. Times are predicted for an idle core",
    "of its own for each process; where cores are shared or busy, the measured step is several times as long.",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--out", default="demo", help="folder to write to (default: demo); replaced if a demo made it")
    parser.add_argument("--devices", type=int, default=2, help="CPU ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=40, help="training epochs (default: 40)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    for line in run_demo(Path(arguments.out), devices=arguments.devices, epochs=arguments.epochs):
        print(line, flush=True)


def run_demo(out: Path, *, devices: int = 2, epochs: int = 40) -> Iterator[str]:
    """Make data, plan, train and predict; yield the text to print between the commands.

    Replaces an earlier demo in `out`. Raises DataError if `out` has files that are not from a demo, and AmpError if a
    command failed, after the command has printed the reason.
    """
    from lightning_amp.data.prepare.synthetic import synthesize

    if out.exists() and not (out / MARK).exists() and any(out.iterdir()):
        raise DataError(
            f"--out {str(out)!r} is not supported: it holds files that no demo wrote; choose an empty or new folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    yield "Synthetic data: 240 cells of 4 types, 2 chromosomes, 12 strata, RNA of the same types"
    synthesize(out / "data", **SYNTHETIC, overwrite=True)
    config = out / "config.yaml"
    config.write_text(CONFIG.substitute(out=out, devices=devices, epochs=epochs))
    checkpoint = out / "checkpoints" / "last.ckpt"
    request = f"--devices {devices} --device-memory 2GiB --batch-size 16 --latent-dim 32 --window 20"
    for command in (
        ["plan", str(out / "data"), *request.split()],
        ["fit", "--config", str(config)],
        ["predict", "--config", str(config), "--ckpt_path", str(checkpoint), "--return_predictions", "false"],
    ):
        yield f"\n$ lightning-amp {shlex.join(command)}\n"
        yield from BEFORE_FIT if command[0] == "fit" else ()
        status = subprocess.run([sys.executable, "-m", "lightning_amp", *command], check=False).returncode
        if status != 0:
            raise AmpError(f"`lightning-amp {shlex.join(command)}` ended with status {status}; its message is above")
    yield f"\nEverything is under {out}: start with {out / 'predictions' / 'embedding.png'}"
