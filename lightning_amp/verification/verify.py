"""Define `verify`: train the user's module on real batches in one process and on several CPU ranks, and compare them.

    one process    Trainer(devices=1) without this package, on the global batch
    ranks          Trainer(strategy=AMPStrategy(...), devices=N), each data rank on its part of the same batch

Both start with the same weights and random state, and train a few steps. The comparison covers the loss of every step,
the gradients that the first step's optimisers use, and the final parameters and buffers. If something differs, the
report lists suspects in the model.

Processes are spawned, so that the caller's process does not change. In an interactive session, where a spawned process
cannot import the user's classes, they are forked with one thread each, because torch's threads do not survive a fork.

Known limits: one node, CPU. Gradient accumulation, clipping and callbacks of the user's own Trainer are not included.
"""

import gc
import io
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_amp._torch import tree_leaves
from lightning_amp.data.files.directory import written_aside
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.bounded_step import LIBRARIES
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification.compare import DTYPES, Precision, Report, find_suspects, rows_of
from lightning_amp.verification.result import Verification
from lightning_amp.verification.training_run import Training, first_of, train_and_compare

GRACE_S = 5.0
"""Seconds for which other ranks may still answer once one has failed; they may wait for it in a collective."""


def run_processes(task: Callable[..., Any], ranks: int, folder: Path, *args: Any, timeout: float) -> list[Any]:
    """Run `task(rank, ranks, folder, *args)` in one process per rank, for `timeout` seconds at most; return results."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise AmpError(
            "verify was called while one of its processes was starting; it starts processes that import the"
            ' script again: put the call under `if __name__ == "__main__":`'
        )
    forked = _is_interactive()
    if forked and dist.is_initialized():
        raise AmpError(
            "verify was called in a session without a file, whose process it forks, and a process group is there"
            " from a run before, which forks cannot use; call torch.distributed.destroy_process_group() first, or"
            " put the module and the call into a file"
        )
    context: Any = multiprocessing.get_context("fork" if forked else "spawn")
    threads = 1 if forked else max(1, (os.cpu_count() or 1) // ranks)
    started: list[Any] = []
    # garbage collection in a fork may run a process group's destructor, which waits for its threads forever
    freezes = forked and not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        for rank in range(ranks):
            process = context.Process(target=_answer, args=(task, rank, ranks, folder, threads, args))
            process.start()
            started.append(process)
        silent = _wait(started, timeout)
        return _answers(folder, ranks, silent, timeout)
    finally:
        if freezes:
            gc.unfreeze()
        for process in started:
            process.kill()
            process.join()


def _wait(started: list[Any], timeout: float) -> list[int]:
    """Wait until all processes have ended; return ranks still running at the timeout, or soon after another failed."""
    running, deadline = dict(enumerate(started)), time.monotonic() + timeout
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running.values()], left)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                # the others may wait for it in a collective forever
                deadline = min(deadline, time.monotonic() + GRACE_S) if process.exitcode else deadline
    return list(running)


def _answers(folder: Path, ranks: int, silent: list[int], timeout: float) -> list[Any]:
    files = sorted(folder.glob("*.answer"), key=lambda file: file.stat().st_mtime_ns)
    answers = {int(file.stem): pickle.loads(file.read_bytes()) for file in files}
    # errors raised by ranks come first, because they explain why other ranks have ended
    for answer in answers.values():
        if isinstance(answer, AmpError):
            raise answer
    for rank in range(ranks):
        if rank not in answers and rank not in silent:
            raise AmpError(
                f"rank {rank} ended without a message; see what it has printed. It may have run out of "
                "memory, or failed to import the script that calls verify: put the call under `if "
                '__name__ == "__main__":`'
            )
    if silent:
        raise AmpError(
            f"{', '.join(f'rank {rank}' for rank in silent)} did not answer within {timeout:.0f} s; if steps take"
            " long, raise timeout; if they do not, ranks wait for each other because they communicate unequally often"
        )
    return [answers[rank] for rank in range(ranks)]


def _is_interactive() -> bool:
    """Whether classes of the main module exist in this process only, and it can be forked."""
    # python uses "<stdin>" as the file of a program on standard input
    has_file = Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file()
    return not has_file and "fork" in multiprocessing.get_all_start_methods()


def _answer(task: Callable[..., Any], rank: int, ranks: int, folder: Path, threads: int, args: Any) -> None:
    """Run the task in a new process, without output, and exit with the caller."""
    caller = multiprocessing.parent_process()
    assert caller is not None, "this process has been started by another"

    def end_with_caller() -> None:
        caller.join()
        os._exit(1)

    threading.Thread(target=end_with_caller, daemon=True).start()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        answer = task(rank, ranks, folder, *args)
    except BaseException as error:
        answer = error
        if not isinstance(error, AmpError):
            # with the user's frames as text: the error itself may not be picklable for the caller
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or list(frames)
            where = "".join(traceback.format_list(own)).rstrip()
            answer = AmpError(
                f"verify cannot train the module: in rank {rank} {type(error).__name__} was raised: {error}; it must"
                f" train there before it can be compared. It was raised in\n{where}"
            )
    # written atomically, because the caller may read it at any time
    with written_aside(folder / f"{rank}.answer") as aside:
        aside.write_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    # exits at once, because freeing the memory takes long
    os._exit(isinstance(answer, AmpError))


def verify(
    module: LightningModule,
    data: Any,
    *,
    devices: int = 2,
    steps: int = 3,
    precisions: Sequence[Precision] = ("float32", "float64"),
    timeout: float = 7200.0,
    **options: Any,
) -> Verification:
    """Compare training on one process with training on several ranks: losses, gradients, weights and buffers.

    Args:
        module: The module, which does not change: processes train copies of it, on CPU.
        data: A data module, a loader, several loaders in a list, dictionary or CombinedLoader, or one global batch,
            which is then used in every step.
        devices: Number of ranks.
        steps: Number of batches to train on.
        precisions: "float32", "float64" or both.
        timeout: Seconds for all runs together; a real model may take long on CPU.
        **options: Of AMPStrategy: `strategies`, `policy`, `plan`, `model_parallel_size`, `share_batch_statistics`, ...

    Returns:
        A Verification; `ok` is True if all quantities are equal up to rounding, and `print` shows the report.

    Raises:
        AmpError: An argument is not supported, the module cannot be pickled, the batch cannot be split over the data
            ranks, or training raised an error, which the message contains.
    """
    for name, number in (("devices", devices), ("steps", steps)):
        if type(number) is not int or number < 1:
            raise PlanError(f"{name}={number!r} is not supported by verify; allowed is a whole number of 1 or more")
    if not precisions or any(precision not in DTYPES for precision in precisions):
        raise PlanError(
            f"precisions={precisions!r} is not supported by verify; allowed are one or both of {list(DTYPES)!r}"
        )
    AMPStrategy(**options)
    run = Training(steps=steps, precisions=list(precisions), options=options, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="amp-verify-") as folder:
        (Path(folder) / "subject.pt").write_bytes(subject_of(module, data, steps))
        found = run_processes(train_and_compare, devices, Path(folder), run, timeout=timeout)
    return verification_of(type(module).__name__, found)


def verification_of(module: str, found: Sequence[Sequence[Report]]) -> Verification:
    """Combine the reports of every rank in every precision to a result; `module` is the module's class name."""
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
    """Pickle module and data for the other processes."""
    if isinstance(data, LightningDataModule):
        # otherwise its trainer would be pickled too
        data = copy(data)
        data.trainer = None
    else:
        loaders = any(isinstance(part, DataLoader | CombinedLoader) for part in tree_leaves(data))
        data = first_of(data, steps) if loaders else [data] * steps
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
