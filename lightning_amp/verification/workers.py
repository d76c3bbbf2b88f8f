"""Processes that carry out training runs: the single process, and the ranks, which are connected.

Processes are spawned, so that nothing of the caller's process changes and nothing of it is shared. In an interactive
session, where a new process cannot import the user's classes, they are forked instead; torch then uses one thread in
each, for its pool of threads does not survive a fork.

Known limits: one node, CPU; a script that is spawned from needs `if __name__ == "__main__":` around its work.
"""

import faulthandler
import gc
import logging
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist

from lightning_amp.errors import AmpError

START_S = 300.0
"""For importing torch and the user's code, on a busy machine."""
GRACE_S = 5.0
"""How long other ranks may still report once one has failed; they may wait for it in a collective."""
STACK_AT = 0.9
"""Share of the time of a task after which a process writes where it stands."""
FRAMES = 12
"""How many of a silent process's functions are told: the innermost one, and those outside of libraries."""
SINGLE = -1
"""Rank of the single process."""

LIBRARIES = tuple(str(Path(found).parent) for found in (torch.__file__, lightning.__file__, __file__))
"""Folders of code that says little about where an error of the user's comes from."""

ENDED = (
    "what it has printed says more. It may have run out of memory, or it could not import the script that calls verify:"
    ' that needs `if __name__ == "__main__":` around its work'
)

Task = Callable[..., Any]


class Workers:
    """The single process and some ranks, each a pool of one worker, which keeps its process group between tasks."""

    def __init__(self, ranks: int, folder: Path, *, timeout: float) -> None:
        """Describe the pools, which `with` starts: an empty folder that all see, and seconds that a task may take."""
        self.folder = folder
        self._ranks, self._timeout = ranks, timeout
        self._broken = False
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> "Workers":
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise AmpError(
                "verify was called while one of its own processes was starting; it starts processes that import the"
                ' script again: put the call under `if __name__ == "__main__":`'
            )
        forked = _is_interactive()
        if forked and dist.is_initialized():
            raise AmpError(
                "verify was called in a session without a file, whose process it forks, and a process group is there"
                " from a run before, which forks cannot use; call torch.distributed.destroy_process_group() first, or"
                " put the module and the call into a file"
            )
        context = multiprocessing.get_context("fork" if forked else "spawn")
        threads = 1 if forked else max(1, (os.cpu_count() or 1) // self._ranks)
        for rank in (SINGLE, *range(self._ranks)):
            about = (rank, self._ranks, self.folder, threads)
            self._pools[rank] = ProcessPoolExecutor(1, context, _start, about)
        try:
            with _collecting_nothing_of_ours() if forked else nullcontext():
                self._call(list(self._pools), _nothing, (), START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # at once: a rank may wait for another one, and to free memory piece by piece takes long
        for process in self._processes:
            process.kill()
        for pool in self._pools.values():
            pool.shutdown()

    def single(self, task: Task, *args: Any) -> Any:
        """The result of `task(rank, folder, *args)` in the single process.

        Raises:
            AmpError: What the task raised, or what became of the process.
        """
        return self._call([SINGLE], task, args, self._timeout)[0]

    def ranks(self, task: Task, *args: Any) -> list[Any]:
        """The results of `task(rank, folder, *args)` on all ranks; errors as for `single`."""
        return self._call(list(range(self._ranks)), task, args, self._timeout)

    def _call(self, ranks: list[int], task: Task, args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Results in the order of the ranks.

        Raises:
            AmpError: The first that a rank has raised, or that one has ended or not answered.
        """
        if self._broken:
            raise AmpError("a rank has not answered before, so no more can be tried")
        before = multiprocessing.active_children()
        runs = {
            self._pools[rank].submit(_carry_out, task, rank, self.folder, args, timeout): rank
            for rank in ranks
        }
        self._processes += [child for child in multiprocessing.active_children() if child not in before]
        first = [run for run in wait(runs, timeout, FIRST_EXCEPTION).done if _error(run)]
        if first:
            wait(runs, GRACE_S)
        self._broken = any(not run.done() or isinstance(_error(run), BrokenProcessPool) for run in runs)
        _raise_failure(first, runs, timeout, self.folder)
        return [run.result() for run in runs]


def _raise_failure(
    first: "list[Future[Any]]", runs: "dict[Future[Any], int]", timeout: float, folder: Path
) -> None:
    """Raise what came first, if anything has failed."""
    # what another rank has raised says why one has ended
    for error in map(_error, (*first, *runs)):
        if error is not None and not isinstance(error, BrokenProcessPool):
            raise error
    if first:
        raise AmpError(f"{_named(runs[first[0]])} ended without a word; {ENDED}")
    silent = [rank for run, rank in runs.items() if not run.done()]
    if silent:
        stood = "".join(f"\n{_named(rank)} stood in\n{_stack(folder, rank)}" for rank in silent)
        raise AmpError(
            f"{', '.join(map(_named, silent))} gave no answer within {timeout:.0f} s; a step that takes long needs a"
            f" larger timeout, and ranks that wait for each other were made to communicate unequally often{stood}"
        )


def _error(run: "Future[Any]") -> BaseException | None:
    return run.exception() if run.done() else None


def _is_interactive() -> bool:
    """Whether classes of the main module can only be had by forking."""
    # of a program on standard input python calls the file "<stdin>"
    has_file = Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file()
    return not has_file and "fork" in multiprocessing.get_all_start_methods()


@contextmanager
def _collecting_nothing_of_ours() -> Iterator[None]:
    """Let processes that are forked meanwhile collect no garbage of this one.

    A process group among it would be waited for in its destructor: for threads that a fork does not have, without end.
    """
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        # what the user has frozen stays so
        if not frozen:
            gc.unfreeze()


def _named(rank: int) -> str:
    return "the single process" if rank == SINGLE else f"rank {rank}"


def _start(rank: int, ranks: int, folder: Path, threads: int) -> None:
    """Become a worker: quiet, with the environment that torchrun would set, and gone when the caller is."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    place, size = (0, 1) if rank == SINGLE else (rank, ranks)
    os.environ.update(RANK=str(place), LOCAL_RANK=str(place), WORLD_SIZE=str(size), MASTER_ADDR="localhost")
    if rank != SINGLE:
        store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=30)
        )


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None, "a worker has been started by a process"
    caller.join()
    os._exit(1)


def _stack(folder: Path, rank: int) -> str:
    """What a rank's main thread was doing shortly before its time was over."""
    try:
        threads = (folder / f"{rank}.stack").read_text().split("\n\n")
    except OSError:  # it has not come to begin
        return "no function yet"
    frames = [
        [line for line in thread.splitlines() if line.lstrip().startswith("File")] for thread in threads
    ]
    # of other threads, which it may wait for, the innermost function
    others = [thread[0] for thread in frames[:-1] if thread]
    innermost, *callers = frames[-1] or ["no function"]
    led = [frame for frame in callers if not any(f'"{folder}' in frame for folder in LIBRARIES)]
    beside = ["beside it, other threads:", *others] if others else []
    return "\n".join([*[innermost, *led][:FRAMES], *beside])


def _nothing(rank: int, folder: Path) -> None:
    """The task by which a process shows that it is there."""


def _carry_out(task: Task, rank: int, folder: Path, args: tuple[Any, ...], timeout: float) -> Any:
    stack = (folder / f"{rank}.stack").open("w")
    # by the interpreter's own thread: a rank that hangs in a collective does not come to write it
    faulthandler.dump_traceback_later(timeout * STACK_AT, file=stack)
    try:
        return task(rank, folder, *args)
    except BaseException as error:
        raise _told(error, rank) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        stack.close()
        sys.stdout.flush()
        sys.stderr.flush()


def _told(error: BaseException, rank: int) -> AmpError:
    """An error as the caller's process can raise it."""
    if isinstance(error, AmpError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or list(frames)
    where = "".join(traceback.format_list(own)).rstrip()
    return AmpError(
        f"the module was to be trained for verify, and {type(error).__name__} was raised in {_named(rank)}: {error};"
        f" it must train there before it can be compared. Seen in\n{where}"
    )
