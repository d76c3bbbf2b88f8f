"""Processes that carry out training runs: one that is alone, and the ranks, which are connected.

Processes are spawned, so that nothing of the caller's process changes and nothing of it is shared. In an interactive
session, where a new process cannot import the user's classes, they are forked instead; torch then uses one thread in
each, for its pool of threads does not survive a fork.

Known limits: one node, CPU; a script that is spawned from needs `if __name__ == "__main__":` around its work.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning
import torch
import torch.distributed as dist

from lightning_amp.errors import AmpError

START_S = 300.0
"""For importing torch and the user's code, on a busy machine."""
GRACE_S = 5.0
"""How long other ranks may still report once one has failed; they may wait for it in a collective."""
LEAVE_S = 10.0
POLL_S = 5.0
ALONE = -1
"""Rank of the process that is alone."""

LIBRARIES = tuple(str(Path(found).parent) for found in (torch.__file__, lightning.__file__, __file__))
"""Folders of code that says little about where an error of the user's comes from."""

Task = Callable[..., Any]


class _Ended(AmpError):
    """A process is gone."""


class Workers:
    """A pool of one process that is alone and some ranks.

    Attributes:
        folder: Given to every task.
    """

    def __init__(self, ranks: int, folder: Path, *, timeout: float) -> None:
        """Describe the pool; `with` starts it.

        Args:
            ranks: How many.
            folder: An empty one that all see.
            timeout: Seconds that a task may take.
        """
        self.folder = folder
        self._ranks, self._timeout = ranks, timeout
        self._broken = False
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}

    def __enter__(self) -> "Workers":
        forked = _is_interactive()
        context = multiprocessing.get_context("fork" if forked else "spawn")
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise AmpError(
                "verify was called while one of its own processes was starting; it starts processes that import the"
                ' script again: put the call under `if __name__ == "__main__":`'
            )
        threads = 1 if forked else max(1, (os.cpu_count() or 1) // self._ranks)
        try:
            for rank in (ALONE, *range(self._ranks)):
                ours, theirs = context.Pipe()
                args = (rank, self._ranks, self.folder, threads, theirs)
                process = context.Process(target=_serve, args=args)  # type: ignore[attr-defined]
                process.start()
                theirs.close()
                self._processes[rank], self._pipes[rank] = process, ours
            self._collect(list(self._pipes), START_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def alone(self, task: Task, *args: Any) -> Any:
        """The result of `task(rank, folder, *args)` in the process that is alone.

        Raises:
            AmpError: What the task raised, or what became of the process.
        """
        return self._call([ALONE], task, args)[0]

    def ranks(self, task: Task, *args: Any) -> list[Any]:
        """The results of `task(rank, folder, *args)` on all ranks; errors as for `alone`."""
        return self._call(list(range(self._ranks)), task, args)

    def _call(self, ranks: list[int], task: Task, args: tuple[Any, ...]) -> list[Any]:
        if self._broken:
            raise AmpError("a rank has not answered before, so no more can be tried")
        for rank in ranks:
            self._pipes[rank].send((task, args))
        return self._collect(ranks, self._timeout)

    def _collect(self, ranks: list[int], timeout: float) -> list[Any]:
        """Results in the order of the ranks.

        Raises:
            AmpError: The first that a rank has raised, or that one has ended or not answered.
        """
        reports: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(reports) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            silent = {self._pipes[rank]: rank for rank in ranks if rank not in reports}
            for pipe in wait(list(silent), left):
                rank = silent[pipe]  # type: ignore[index]
                try:
                    reports[rank] = self._pipes[rank].recv()
                except EOFError:
                    reports[rank] = (False, _Ended(f"{_named(rank)} ended without a word; {ENDED}"))
                if not reports[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = [report for ok, report in reports.values() if not ok]
        ended = [report for report in failed if isinstance(report, _Ended)]
        self._broken = len(reports) < len(ranks) or bool(ended)
        if failed:
            # what another rank has raised says why this one has ended
            raise next((report for report in failed if report not in ended), failed[0])
        if len(reports) < len(ranks):
            silent_ranks = ", ".join(_named(rank) for rank in ranks if rank not in reports)
            raise AmpError(
                f"{silent_ranks} gave no answer within {timeout:.0f} s; a step that takes long needs a larger timeout,"
                " and ranks that wait for each other were made to communicate unequally often"
            )
        return [reports[rank][1] for rank in ranks]

    def _end(self) -> None:
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + LEAVE_S
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()


ENDED = (
    "what it has printed says more. It may have run out of memory, or it could not import the script that calls verify:"
    ' that needs `if __name__ == "__main__":` around its work'
)


def _is_interactive() -> bool:
    """Whether classes of the main module can only be had by forking."""
    # of a program on standard input python calls the file "<stdin>"
    has_file = Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file()
    return not has_file and "fork" in multiprocessing.get_all_start_methods()


def _named(rank: int) -> str:
    return "the single process" if rank == ALONE else f"rank {rank}"


def _serve(rank: int, ranks: int, folder: Path, threads: int, pipe: Connection) -> None:
    """Carry out tasks until told to leave, or until the caller is gone."""
    parent = os.getppid()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if rank != ALONE:
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(folder / "store"), ranks
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=30)
        )
    pipe.send((True, "ready"))
    while True:
        while not pipe.poll(POLL_S):
            if os.getppid() != parent:
                return
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked is None:
            break
        task, args = asked
        try:
            report = (True, task(rank, folder, *args))
        except Exception as error:
            report = (False, _told(error, rank))
        pipe.send(report)
    if rank != ALONE:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # all that is left is to free memory piece by piece, which the caller would wait for
    os._exit(0)


def _told(error: Exception, rank: int) -> AmpError:
    """An error as the caller's process can raise it."""
    if isinstance(error, AmpError) and _survives(error):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or list(frames)
    where = "".join(traceback.format_list(own)).rstrip()
    return AmpError(
        f"the module was to be trained for verify, and {type(error).__name__} was raised in {_named(rank)}: {error};"
        f" it must train there before it can be compared. Seen in\n{where}"
    )


def _survives(error: AmpError) -> bool:
    """Whether it can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
