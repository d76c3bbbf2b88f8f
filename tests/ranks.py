"""Run a function on several ranks: real processes, gloo, a file as meeting point, results and failures handed back.

The processes are started once for a test run and take function after function.
"""

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import LOGS

PRELOADED = (
    "pytest",
    "torch.distributed",
    "lightning.pytorch",
    "lightning_amp.lightning.strategy.strategy",
    # what a strategy imports late, with pandas and h5py: a second of every rank
    "lightning_amp.lightning.strategy.install_plan",
    "tests.techniques.sharded_cases",
)
"""Imported once, by the process that ranks are forks of: seconds for each of them otherwise."""

START_S = 120.0
"""For importing torch and finding each other, on a busy machine."""

GRACE_S = 2.0
"""How long the other ranks may still report once one has failed."""

POOL: list[tuple[Any, Connection]] = []
"""Processes that wait for the next function."""

MARKED = True
"""Whether the running test is marked `ranks` (conftest.py sets it), so that `make check` can leave it out."""

NO_WORD = "the process ended without a word"
"""Of a rank that has ended before it has reported."""

BOOKKEEPING = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators of functional collectives that move nothing."""


HANDED_IN = {"allreduce_": lambda args: args[0][0], "_allgather_base_": lambda args: args[1]}
"""What a rank puts into collectives of c10d."""


class CountCollectives(TorchDispatchMode):
    """Counts this rank's collectives by operator; CommDebugMode cannot be entered around a module's backward.

    `sent` has the bytes that the rank put into functional collectives and those of `HANDED_IN`, by operator.
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
            elif func._opname in HANDED_IN:
                self.sent[func._opname] += HANDED_IN[func._opname](args).nbytes
        return func(*args, **(kwargs or {}))


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    tmp_path: Path,
    *args: Any,
    timeout: float = 150,
    fresh: bool = False,
    starts: int = 2,
) -> list[Any]:
    """Call `body(rank, world_size, *args)` on every rank and return the results in the order of ranks.

    The processes are those of the last call, and start when there are not enough of them. All wait until every rank
    has reported, so that no rank fails because another one has left. The first traceback becomes the test's failure;
    ranks that have not reported by then, or by `timeout` seconds, are made to write where they stand. After a failure
    the next call gets new processes.

    Args:
        body: A function at the top level of its module; its result must be picklable.
        world_size: Ranks.
        tmp_path: A folder.
        *args: Given to every rank.
        timeout: Seconds for the body, not counting the start of the processes.
        fresh: Start processes for this call alone: `body` measures its process, or changes what outlives it.
        starts: How often processes may be started: gloo's connections fail now and then, before `body` begins.
    """
    assert MARKED, "a test that starts ranks needs @pytest.mark.ranks"
    ranks = [] if fresh else POOL[:world_size]
    ranks += [_start() for _ in range(world_size - len(ranks))]
    POOL[:world_size] = []
    connections = [connection for _, connection in ranks]
    # by value: multiprocessing would hand over a file for every tensor
    sent = pickle.dumps((body, args))
    try:
        # two calls may have one folder, and what the first has left of its meeting is in the way
        meet = tempfile.mkdtemp(dir=tmp_path)
        for rank, connection in enumerate(connections):
            connection.send((sent, rank, world_size, Path(meet), Path.cwd(), dict(os.environ)))
        reports = _collect(connections, START_S)
        started = all(ok for ok, _ in reports.values()) and len(reports) == world_size
        if not started and starts > 1:
            return run_ranks(body, world_size, tmp_path, *args, timeout=timeout, fresh=fresh, starts=starts - 1)
        if started:
            reports = _collect(connections, timeout)
        failed = [(rank, text) for rank, (ok, text) in reports.items() if not ok]
        if failed or len(reports) < world_size:
            processes = [process for process, _ in ranks]
            crashed = {rank for rank, text in failed if text == NO_WORD}
            stacks = _stacks(processes, set(range(world_size)) - set(reports) | crashed, Path(meet))
            first = f"rank {failed[0][0]} failed:\n{failed[0][1]}" if failed else "ranks gave no answer in time"
            pytest.fail(f"{first}\n{stacks}", pytrace=False)
        results = [pickle.loads(reports[rank][1]) for rank in range(world_size)]
        for connection in connections:
            connection.send("leave")
        if not fresh:
            POOL[:0], ranks = ranks, []
        return results
    finally:
        for process, connection in ranks:
            connection.close()
            if fresh and sys.exc_info()[0] is None:
                process.join(timeout=10)
            process.kill()
            process.join()


def _start() -> tuple[Any, Connection]:
    """A process that waits for bodies, and the connection to it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


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
                reports[rank] = (False, NO_WORD)
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


def _serve(connection: Connection) -> None:
    """Take body after body, until the other end is closed."""
    # what is imported is looked at no more when garbage is collected
    gc.freeze()
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        with _as_in_a_new_process():
            _run(connection, *asked)
        gc.collect()


def _run(
    connection: Connection,
    sent: bytes,
    rank: int,
    world_size: int,
    folder: Path,
    where: Path,
    environment: dict[str, str],
) -> None:
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    body, args = pickle.loads(sent)
    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        # a crash of the process leaves its stacks there
        faulthandler.enable(stack, all_threads=True)
        import torch.distributed as dist

        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600))
        connection.send((True, "ready"))
        try:
            report = (True, pickle.dumps(body(rank, world_size, *args)))
        except BaseException:
            report = (False, traceback.format_exc())
        connection.send(report)
        connection.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


@contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    """Give the next body the settings and random states that this one found."""
    import numpy as np
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    torch.set_num_threads(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    rank, dtype = getattr(rank_zero_only, "rank", 0), torch.get_default_dtype()
    levels = {name: logging.getLogger(name).level for name in LOGS}
    with warnings.catch_warnings():
        yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    rank_zero_only.rank = rank
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        # what DTensor has cached holds meshes, whose groups end with the body
        debug._clear_sharding_prop_cache()
    # what Lightning says once per process
    for module in list(sys.modules.values()):
        if (cache := vars(module).get("warning_cache")) is not None:
            cache.clear()
