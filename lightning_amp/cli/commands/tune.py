"""`lightning-amp tune`: train some steps on each of the grids with the best prediction; write the fastest plan."""

import argparse
import json
import re
import subprocess
import sys
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_amp.cli.commands import plan
from lightning_amp.cli.commands.calibrate import check_target
from lightning_amp.data.files.directory import written_aside
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_seconds
from lightning_amp.text_table import table

TIMER = "lightning_amp.lightning.steps.step_time.StepSeconds"
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
"""Options of the Trainer that are switched off, because they do not affect a training step."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--config", required=True, metavar="FILE.yaml", help="of `lightning-amp fit`")
    parser.add_argument("--devices", required=True, type=int, help="ranks on this machine")
    parser.add_argument("--out", required=True, metavar="PLAN.json", help="file to write, for AMPStrategy(plan=)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--grids", type=int, default=3, help="grids to try, of the first five (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each, of which two do not count (default: 8)")
    parser.add_argument("--device-memory", help="memory of one device, such as 24GiB (default: unknown)")
    parser.add_argument("--rates", metavar="FILE.json", help="rates that `calibrate` has measured")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    check_target("--out", arguments.out, "plan.json", overwrite=arguments.overwrite)
    words = ["--config", arguments.config, "--devices", str(arguments.devices), "--strategies", "tensor3d"]
    for name in ("device_memory", "rates"):
        if getattr(arguments, name) is not None:
            words += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    notes = _planned([*words, "--tensor-grid", "auto"]).notes
    listed = [re.match(r"tensor_grid=\((\d+), (\d+), (\d+)\): ", note) for note in notes]
    grids = [found.groups() for found in listed if found][: arguments.grids]
    if not grids or arguments.steps < 3:
        raise PlanError(
            f"--devices {arguments.devices!r} with --grids {arguments.grids!r} and --steps {arguments.steps!r} was"
            " given, which leaves nothing to compare; allowed are two devices or more, one grid or more, and three"
            " steps or more"
        )
    rows, best, least = list[tuple[str, ...]](), None, inf
    for grid in grids:
        made = _planned([*words, "--tensor-grid", ",".join(grid)])
        seconds, why = _measured(made, arguments)
        # per batch: each data-parallel rank reads one
        predicted, measured = (made.predicted_step_seconds or inf) / made.mesh.data, seconds / made.mesh.data
        rows.append((", ".join(grid), format_seconds(predicted), why or format_seconds(measured)))
        if measured < least:
            best, least = made, measured
    print(table(("tensor_grid", "predicted, a batch", "measured"), rows))
    if best is None:
        raise PlanError(
            "no grid could be trained on; the reasons are above: use more devices, a smaller batch, or more --grids"
        )
    with written_aside(Path(arguments.out)) as aside:
        aside.write_text(best.to_json() + "\n")
    print(f"\nwrote {arguments.out}: use it with AMPStrategy(plan={arguments.out!r})")


def _planned(words: list[str]) -> Plan:
    # imported late: torch takes seconds to import
    from lightning_amp.cli.configuration import plan_of_configuration

    parser = argparse.ArgumentParser()
    plan.add_flags(parser)
    return plan_of_configuration(parser.parse_args(words)).plan


def _measured(made: Plan, arguments: argparse.Namespace) -> tuple[float, str]:
    """Measure the seconds of a step of `lightning-amp fit` under a plan; infinity and the reason if it fails."""
    with TemporaryDirectory() as folder:
        file, seconds = Path(folder, "plan.json"), Path(folder, "seconds")
        file.write_text(made.to_json())
        timer = [{"class_path": TIMER, "init_args": {"path": str(seconds)}}]
        settings = {
            "strategy": "amp",
            "strategy.plan": str(file),
            # LightningCLI writes the configuration of the run there
            "default_root_dir": folder,
            "devices": arguments.devices,
            "callbacks": json.dumps(timer),
            # a loader may have fewer batches than the steps to measure
            "max_epochs": -1,
            "max_steps": arguments.steps,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            **dict.fromkeys(OFF, "false"),
        }
        words = [f"--trainer.{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "lightning_amp", "fit", "--config", arguments.config, "--ckpt_path=null"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        if done.returncode or not seconds.exists():
            said = done.stderr.strip().splitlines() or ["it has said nothing"]
            return inf, f"fails: {said[-1]}"
        return float(seconds.read_text()), ""
