"""`lightning-amp tune`: train some steps under each of the plans with the best prediction; write the fastest one."""

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
from lightning_amp.planning.reports.plan_report import techniques
from lightning_amp.progress import track
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
    parser.add_argument(
        "--strategies", choices=["tensor3d"], help="try the grids of tensor3d, and not what the policy has compared"
    )
    parser.add_argument("--plans", type=int, default=3, help="plans to try, at most five grids (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each, of which two do not count (default: 8)")
    parser.add_argument("--device-memory", help="memory of one device, such as 24GiB (default: unknown)")
    parser.add_argument("--rates", metavar="FILE.json", help="rates that `calibrate` has measured")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    check_target("--out", arguments.out, "plan.json", overwrite=arguments.overwrite)
    words = ["--config", arguments.config, "--devices", str(arguments.devices)]
    for name in ("device_memory", "rates"):
        if getattr(arguments, name) is not None:
            words += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    requested = (_grids(words) if arguments.strategies else _compared(words))[: max(0, arguments.plans)]
    if not requested or arguments.steps < 3:
        raise PlanError(
            f"--devices {arguments.devices!r} with --plans {arguments.plans!r} and --steps {arguments.steps!r} was"
            " given, which leaves nothing to compare; allowed are one plan or more, three steps or more, and for grids"
            " two devices or more"
        )
    rows, best, least = list[tuple[str, ...]](), None, inf
    for name, more in track(requested, description="training under a plan", total=len(requested)):
        made = _planned([*words, *more])
        seconds, why = _measured(made, arguments)
        # per batch: each data-parallel rank reads one
        predicted, measured = (made.predicted_step_seconds or inf) / made.mesh.data, seconds / made.mesh.data
        rows.append((name, format_seconds(predicted), why or format_seconds(measured)))
        if measured < least:
            best, least = made, measured
    print(table(("plan", "predicted, a batch", "measured"), rows))
    if best is None:
        raise PlanError(
            "no plan could be trained with; the reasons are above: use more devices, a smaller batch, or more --plans"
        )
    with written_aside(Path(arguments.out)) as aside:
        aside.write_text(best.to_json() + "\n")
    print(f"\nwrote {arguments.out}: use it with AMPStrategy(plan={arguments.out!r})")


def _compared(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return the plans that the policy has compared and that fit, the fastest first: names, and words to plan them."""
    fitting = [one for one in _planned(words).candidates if not one.verdict.startswith("exceeds")]
    found = dict[str, list[str]]()
    for one in sorted(fitting, key=lambda one: (one.verdict != "chosen", one.cell_seconds)):
        size = ["--model-parallel-size", str(one.model)] if one.model > 1 else []
        name = f"{techniques(one.strategies)} on {one.data} x {one.model}"
        found.setdefault(name, ["--strategies", ",".join(one.strategies) or "S1", *size])
    return list(found.items())


def _grids(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return the grids of tensor3d that a plan ranks first, as `_compared`."""
    by_name = ["--strategies", "tensor3d", "--tensor-grid"]
    notes = _planned([*words, *by_name, "auto"]).notes
    listed = [re.match(r"tensor_grid=\((\d+), (\d+), (\d+)\): ", note) for note in notes]
    return [(", ".join(found.groups()), [*by_name, ",".join(found.groups())]) for found in listed if found]


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
