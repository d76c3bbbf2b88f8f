"""Define `verify`: train the user's module on a real batch, in one process and on several CPU ranks, and compare.

    one process    Trainer(devices=1) without this package, on the global batch
    ranks          Trainer(strategy=AMPStrategy(...), devices=N), each data rank on its part of the same batch

Both start from the same weights and generators and train a few steps. Compared are the loss of every step, the
gradients that the first step's optimisers see, and parameters and buffers at the end. Where something differs, suspects
in the model are named.

Known limits: gradient accumulation, clipping and callbacks of the user's own Trainer are not part of it.
"""

import io
import pickle
import tempfile
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_amp.errors import AmpError, PlanError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification.compare import DTYPES, Precision, Report, find_suspects, rows_of
from lightning_amp.verification.processes import run_processes
from lightning_amp.verification.result import Verification
from lightning_amp.verification.training_run import Run, first_of, train_and_compare

TIMEOUT_S = 7200.0
"""For all runs of a few steps; a real model may take long on CPU."""


def verify(
    module: LightningModule,
    data: Any,
    *,
    devices: int = 2,
    steps: int = 3,
    precisions: Sequence[Precision] = ("float32", "float64"),
    timeout: float = TIMEOUT_S,
    **options: Any,
) -> Verification:
    """Train a module on one process and on several ranks, and compare.

    Args:
        module: Left as it is: processes train copies of it, on CPU.
        data: A data module, a loader, or one global batch, which is then trained on in every step.
        devices: Ranks in all.
        steps: Batches to train on.
        precisions: "float32", "float64" or both.
        timeout: Seconds that all runs together may take.
        **options: Of AMPStrategy: `strategies`, `policy`, `plan`, `model_parallel_size`, `share_batch_statistics`, ...

    Raises:
        AmpError: An argument outside what is allowed, the module cannot be sent to a process, the batch cannot be
            split over the data ranks, or training raised an error; it says which.
    """
    for name, number in (("devices", devices), ("steps", steps)):
        if type(number) is not int or number < 1:
            raise PlanError(
                f"{name}={number!r} is not supported by verify; allowed is a whole number of 1 or more"
            )
    if not precisions or any(precision not in DTYPES for precision in precisions):
        raise PlanError(
            f"precisions={precisions!r} is not supported by verify; allowed are one or both of {list(DTYPES)!r}"
        )
    AMPStrategy(**options)
    run = Run(steps=steps, precisions=list(precisions), options=options, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="amp-verify-") as folder:
        (Path(folder) / "subject.pt").write_bytes(subject_of(module, data, steps))
        found = run_processes(train_and_compare, devices, Path(folder), run, timeout=timeout)
    return verification_of(type(module).__name__, found)


def verification_of(module: str, found: Sequence[Sequence[Report]]) -> Verification:
    """The result for a module of some class, of every rank's reports in every precision."""
    by_precision = list(zip(*found, strict=True))
    rows = tuple(row for reports in by_precision for row in rows_of(reports))
    first = found[0][0]
    return Verification(
        module=module,
        strategies=first.strategies,
        mesh=first.mesh,
        cells=first.all_cells,
        steps=len(first.one_losses),
        rows=rows,
        suspects=find_suspects(rows, [report for reports in by_precision for report in reports]),
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
            f"verify cannot send {type(module).__name__} and its data to other processes, because "
            f"they cannot be pickled: {error}; define classes at the top level of a file, and keep "
            "lambdas and open files out of them"
        ) from error
    return buffer.getvalue()
