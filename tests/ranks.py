"""Run a function on several ranks: real processes, gloo, a file as meeting point, results and failures handed back."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

PRELOADED = (
    "pytest",
    "torch.distributed",
    "lightning.pytorch",
    "lightning_amp.lightning.strategy.strategy",
    # what a strategy imports late, with pandas and h5py: a second of every rank
    "lightning_amp.lightning.strategy.install_plan",
    "tests.parallel.sharded_cases",
)
"""Imported once, by the process that ranks are forks of: seconds for each of them otherwise."""

START_S = 120.0
"""For importing torch and finding each other, on a busy machine."""

GRACE_S = 2.0
"""How long the other ranks may still report once one has failed."""


MARKED = True
"""Whether the running test is marked `ranks` (conftest.py sets it), so that `make check` can leave it out."""

BOOKKEEPING = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators of functional collectives that move nothing."""


class CountCollectives(TorchDispatchMode):
    """Counts this rank's collectives by operator; CommDebugMode cannot be entered around a module's backward.

    `sent` has the bytes that the rank put into functional collectives, by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.counts.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in BOOKKEEPING:
            self.counts[func._opname] += 1
            if func.namespace == "_c10d_functional":
                self.sent[func._opname] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def run_ranks(
    body: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, timeout: float = 150
) -> list[Any]:
    """Call `body(rank, world_size, *args)` on every rank and return the results in the order of ranks.

    All processes stay alive until every rank has reported, so that no rank fails because another one has left. The
    first traceback becomes the test's failure; ranks that have not reported by then, or by `timeout` seconds, are
    made to write where they stand.

    Args:
        body: A function at the top level of its module; its result must be picklable.
        world_size: Ranks.
        tmp_path: An empty folder.
        *args: Given to every rank.
        timeout: Seconds for the body, not counting the start of the processes.
    """
    assert MARKED, "a test that starts ranks needs @pytest.mark.ranks"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    pipes = [context.Pipe() for _ in range(world_size)]
    environment = dict(os.environ)
    # by value: multiprocessing would hand over a file for every tensor
    sent = pickle.dumps((body, args))
    processes = [
        context.Process(
            target=_serve,
            args=(sent, rank, world_size, tmp_path, pipes[rank][1], environment),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        connections = [ours for ours, _ in pipes]
        reports = _collect(connections, START_S)
        if all(ok for ok, _ in reports.values()) and len(reports) == world_size:
            reports = _collect(connections, timeout)
        failed = [(rank, text) for rank, (ok, text) in reports.items() if not ok]
        if failed or len(reports) < world_size:
            stacks = _stacks(processes, set(range(world_size)) - set(reports), tmp_path)
            first = (
                f"rank {failed[0][0]} failed:\n{failed[0][1]}" if failed else "ranks gave no answer in time"
            )
            pytest.fail(f"{first}\n{stacks}", pytrace=False)
        for ours, _ in pipes:
            ours.send("leave")
        for process in processes:
            process.join(timeout=10)
        return [pickle.loads(reports[rank][1]) for rank in range(world_size)]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def run_all(
    bodies: Sequence[tuple[int, Callable[..., Any]]], folder: Path, *, timeout: float
) -> dict[str, list[Any]]:
    """Call `body(rank, ranks, folder)` of every (ranks, body) in turn; what `run_ranks` returns, by name."""
    found = {}
    for ranks, body in bodies:
        meet = folder / f"meet {body.__name__}"
        meet.mkdir()
        found[body.__name__] = run_ranks(body, ranks, meet, folder, timeout=timeout)
    return found


def _collect(connections: list[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
    """Reports by rank, in the order in which they came in."""
    reports: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(reports) < len(connections) and (left := deadline - time.monotonic()) > 0:
        waiting = [c for rank, c in enumerate(connections) if rank not in reports]
        for connection in wait(waiting, left):
            rank = connections.index(connection)
            try:
                reports[rank] = connection.recv()
            except EOFError:
                reports[rank] = (False, "the process ended without a word")
            if not reports[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return reports


def _stacks(processes: list[Any], silent: set[int], folder: Path) -> str:
    for rank in silent:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    files = [folder / f"stack{rank}" for rank in sorted(silent)]
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files if file.exists())


def _serve(
    sent: bytes,
    rank: int,
    world_size: int,
    folder: Path,
    connection: Connection,
    environment: dict[str, str],
) -> None:
    # a fork of the server has the environment in which that was started
    os.environ.clear()
    os.environ.update(environment)
    body, args = pickle.loads(sent)
    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600)
        )
        connection.send((True, "ready"))
        try:
            report = (True, pickle.dumps(body(rank, world_size, *args)))
        except BaseException:
            report = (False, traceback.format_exc())
        connection.send(report)
        connection.recv()
        dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
