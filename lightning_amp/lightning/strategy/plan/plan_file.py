"""Write the plan of a run into the folder of its logs, as a report and as JSON that AMPStrategy(plan=) reads, and its
main figures into the hyperparameters of loggers.
"""

from collections.abc import Iterable
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import Logger

from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report


def log_folder(trainer: pl.Trainer) -> str:
    """The folder of a run's logs; "" without a logger that writes files. A collective."""
    return str(trainer.log_dir or "") if trainer.loggers else ""


def report_path(folder: str, plan: Plan) -> str:
    """The file of the report, as short as the current folder allows; "" without a folder."""
    name = f"amp_plan_{plan.evaluates}.txt" if plan.evaluates else "amp_plan.txt"
    return f"{folder.removeprefix(f'{Path.cwd()}/')}/{name}" if folder else ""


def write_plan(folder: str, plan: Plan) -> None:
    """Write the report and the JSON with the same name; rank 0 calls it."""
    files = get_filesystem(folder)
    files.makedirs(folder, exist_ok=True)
    path = report_path(folder, plan)
    for name, text in ((path, plan_report(plan)), (f"{path.removesuffix('.txt')}.json", plan.to_json())):
        with files.open(name, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")


def log_plan(loggers: Iterable[Logger], plan: Plan) -> None:
    """Add the techniques, the predicted peak and the budget to the hyperparameters; rank 0 calls it."""
    figures = {
        "amp_plan": ",".join(plan.strategies),
        "amp_predicted_peak_bytes": plan.predicted_peak_bytes,
        "amp_budget_bytes": plan.budget_bytes,
    }
    for logger in loggers:
        logger.log_hyperparams(figures)
