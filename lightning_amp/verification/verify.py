"""`verify`: the user's own module on a real batch, one process against several CPU ranks under the plan.

    one process    Trainer(devices=1) without this package, on the global batch
    ranks          Trainer(strategy=AMPStrategy(...), devices=N), each data rank on its part of the same batch

Both start from the same weights and generators and train a few steps. Compared are what every module outside a
decomposed decoder makes of every cell, the loss of every step, the gradients that the first step's optimisers see, and
parameters and buffers at the end. Where something differs, experiments say what in the model makes it differ.

Known limits: gradient accumulation, clipping and callbacks of the user's own Trainer are not part of it.
"""

import io
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_amp.errors import AmpError, PlanError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.progress import track
from lightning_amp.verification.experiments import Experiments, Findings
from lightning_amp.verification.find_causes import find_culprits
from lightning_amp.verification.result import Verification
from lightning_amp.verification.split_batch import first_of
from lightning_amp.verification.tolerances import DTYPES, Precision
from lightning_amp.verification.training_run import Run
from lightning_amp.verification.workers import Workers

TIMEOUT_S = 1800.0
"""For one run of a few steps; a real model may take long on CPU."""


def verify(
    module: LightningModule,
    data: Any,
    *,
    devices: int = 2,
    policy: str = "auto",
    plan: str | Path | Plan | None = None,
    strategies: str | list[str] | None = None,
    model_parallel_size: int | str = "auto",
    share_batch_statistics: bool = True,
    steps: int = 3,
    precisions: Sequence[Precision] = ("float32", "float64"),
    timeout: float = TIMEOUT_S,
) -> Verification:
    """Train a module on one process and on several ranks, and compare.

    Args:
        module: Left as it is: processes train copies of it, on CPU.
        data: A data module, a loader, or one global batch, which is then trained on in every step.
        devices: Ranks in all.
        policy, plan, strategies, model_parallel_size, share_batch_statistics: As for AMPStrategy.
        steps: Batches to train on.
        precisions: "float32", "float64" or both.
        timeout: Seconds that one run may take.

    Raises:
        AmpError: The request is none, the module cannot be sent to a process, the batch cannot be split over the data
            ranks, or training raised an error; it says which.
    """
    options = {
        "policy": policy,
        "plan": plan,
        "strategies": strategies,
        "model_parallel_size": model_parallel_size,
        "share_batch_statistics": share_batch_statistics,
    }
    return verify_under(
        module, data, options, devices=devices, steps=steps, precisions=precisions, timeout=timeout
    )


def verify_under(
    module: LightningModule,
    data: Any,
    options: dict[str, Any],
    *,
    devices: int,
    steps: int,
    precisions: Sequence[Precision],
    timeout: float,
) -> Verification:
    """`verify` with all options of AMPStrategy."""
    _check(devices=devices, steps=steps, precisions=precisions)
    AMPStrategy(**options)
    with tempfile.TemporaryDirectory(prefix="amp-verify-") as folder:
        (Path(folder) / "subject.pt").write_bytes(subject_of(module, data, steps))
        with Workers(devices, Path(folder), timeout=timeout) as workers:
            return compare(workers, devices=devices, options=options, steps=steps, precisions=precisions)


def compare(
    workers: Workers, *, devices: int, options: dict[str, Any], steps: int, precisions: Sequence[Precision]
) -> Verification:
    """`verify` for the subject in the folder of some processes, with the options of AMPStrategy."""
    run = Run(precision="float64", steps=steps, ranks=devices, options=options)
    experiments = Experiments(workers, run)
    findings: list[Findings] = []

    def runs() -> Iterator[None]:
        for precision in precisions:
            experiments.run_one(precision=precision)
            yield
            findings.append(experiments.run_ranks(precision=precision))
            yield

    for _ in track(runs(), description="one process, then the ranks", total=2 * len(precisions)):
        pass
    rows = tuple(row for found in findings for row in found.rows)
    first = findings[0].first
    return Verification(
        module=first.module,
        strategies=first.strategies,
        mesh=first.mesh,
        cells=first.all_cells,
        steps=steps,
        rows=rows,
        culprits=find_culprits(experiments, findings) if any(row.wrong for row in rows) else (),
    )


def _check(*, devices: int, steps: int, precisions: Sequence[Precision]) -> None:
    for name, number in (("devices", devices), ("steps", steps)):
        if type(number) is not int or number < 1:
            raise PlanError(f"{name}={number!r} was asked of verify; allowed is a whole number of 1 or more")
    if not precisions or any(precision not in DTYPES for precision in precisions):
        raise PlanError(
            f"precisions={precisions!r} was asked of verify; allowed are one or both of {list(DTYPES)!r}"
        )


def subject_of(module: LightningModule, data: Any, steps: int) -> bytes:
    """Module and data as another process reads them.

    Raises:
        AmpError: They cannot be pickled, or a loader has no batch.
    """
    if isinstance(data, LightningDataModule):
        # a trainer of the user's would be sent along
        data = copy(data)
        data.trainer = None
    else:
        data = first_of(data, steps) if isinstance(data, DataLoader) else [data] * steps
    buffer = io.BytesIO()
    try:
        torch.save((module, data), buffer)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
        raise AmpError(
            f"verify was to send {type(module).__name__} and its data to other processes, and they cannot be pickled:"
            f" {error}; define classes at the top level of a file, and keep lambdas and open files out of them"
        ) from error
    return buffer.getvalue()
