"""Processes on this machine, connected by gloo, that answer request after request."""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from lightning_amp.errors import AmpError

PRELOADED = ("tests.lightning.strategy.strategy_cases", "lightning_amp.lightning.strategy.plan.install_plan")
"""Imported once, by the process that ranks are forks of."""
Found = tuple[str, Any]
"""What a rank answers: "done" and a result, "refused" or "raw" and the error, "hangs"."""


class Ranks:
    """Processes that call a function for each request.

    Args:
        n: Of them.
        answer: `answer(rank, n, *request)` at the top of a module that can be imported; its result can be pickled.
        patience: Seconds to wait for a rank, not counting its start.
    """

    def __init__(self, n: int, answer: Callable[..., Any], *, patience: float = 60.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED])
        pairs = [context.Pipe() for _ in range(n)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(r, n, self._folder.name, theirs, answer), daemon=True)
            for r, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        self._patience, self._starts = patience, 120.0

    def ask(self, *request: Any) -> list[Found]:
        """What every rank answers."""
        for pipe in self._pipes:
            pipe.send(request)
        found = list[Found]()
        for pipe in self._pipes:
            # the others may wait for one that has failed
            patience = 10.0 if any(kind != "done" for kind, _ in found) else self._patience + self._starts
            try:
                found.append(pipe.recv() if wait([pipe], patience) else ("hangs", "no answer"))
            except (EOFError, ConnectionError):
                found.append(("hangs", "the process has ended"))
        self._starts = 0.0
        return found

    def results(self, *request: Any) -> list[Any]:
        """The results of all ranks.

        Raises:
            RuntimeError: One of them has none.
        """
        found = self.ask(*request)
        for rank, (kind, value) in enumerate(found):
            if kind != "done":
                raise RuntimeError(f"rank {rank} {kind}: {value}")
        return [value for _, value in found]

    def end(self) -> None:
        """Kill them."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, n: int, folder: str, pipe: Connection, answer: Callable[..., Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # what Lightning prints is no result
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", answer(rank, n, *request)))
        except AmpError as error:
            pipe.send(("refused", str(error)))
        except BaseException as error:
            lines = traceback.format_exc().splitlines()
            pipe.send(("raw", f"{type(error).__name__}: {error} | " + " ".join(lines[-6:-1])))
