"""Stop all ranks after a failure, each with a message that names the failed rank; and handle SIGTERM."""

import atexit
import gc
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from traceback import StackSummary, walk_tb
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import psutil
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_amp.errors import AmpError
from lightning_amp.lightning._compat import launch_process_observer, trainer_of
from lightning_amp.lightning.faults import activity, launchers
from lightning_amp.lightning.faults.detector import EXIT_STATUS, GRACE_S, Detector, say
from lightning_amp.lightning.faults.link import connect, listen

CONNECT_S = 20.0
LOOK_S = 0.5
"""Seconds between two checks of the parent process."""

Closure = Callable[[], Any]


class FailureWatch:
    """Run the failure detector from when the processes are connected until the end of the run.

    Args:
        strategy: The strategy of the run, of any class, which calls the methods below.
        lost_after, stuck_after: Seconds after which a rank counts as lost, and as stuck.
    """

    def __init__(self, strategy: DDPStrategy, *, lost_after: float, stuck_after: float) -> None:
        self._strategy = strategy
        self._limits = {"lost_after": lost_after, "stuck_after": stuck_after}
        self._detector: Detector | None = None
        self._adopted: list[Any] | None = None
        # whether an optimiser may have changed only some of the parameters so far
        self._stepping = False
        # whether SIGTERM has arrived in the meantime
        self._ends_soon = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy of the strategy, without the detector."""
        return {**vars(self), "_detector": None, "_adopted": None}

    @property
    def _trainer(self) -> pl.Trainer | None:
        return trainer_of(self._strategy.lightning_module)

    @contextmanager
    def starting(self) -> Generator[None, None, None]:
        """End this rank if its parent process ends before the ranks are connected.

        Otherwise its main thread would wait in a collective for the process group's timeout.
        """
        started_by, over = int(os.environ.get(launchers.STARTED_BY, 0)), threading.Event()
        if started_by:
            threading.Thread(target=self._end_with, args=(started_by, over), daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _end_with(self, process: int, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            try:
                # a process that has ended keeps its id until its parent waits for it, as a zombie
                if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                    break
            except psutil.NoSuchProcess:
                break
        else:
            return
        say(
            f"rank {self._strategy.global_rank} ends: process {process}, which has started it, ended before the ranks"
            " were connected"
        )
        os._exit(EXIT_STATUS)

    def connected(self) -> None:
        """Start the detector once the processes are connected."""
        strategy, trainer = self._strategy, self._trainer
        if strategy.world_size == 1:
            return
        if trainer is not None and not _requeues_on_sigterm(strategy.cluster_environment):
            self._end_on_sigterm(trainer)
        self._begin(strategy, trainer)

    def _begin(self, strategy: DDPStrategy, trainer: pl.Trainer | None) -> None:
        assert strategy.cluster_environment is not None, "the Trainer sets the environment"
        self.end(failed=False)
        address = strategy.cluster_environment.main_address
        first = strategy.global_rank == 0
        listener = listen(address) if first else None
        port = listener.getsockname()[1] if listener else 0
        port, token = strategy.broadcast((port, secrets.token_hex(16)))
        link = None
        if not first:
            try:
                link = connect(address, port, timeout=CONNECT_S)
            except OSError as error:
                say(
                    f"rank {strategy.global_rank} cannot reach rank 0's failure detector at {address}:{port} ({error});"
                    " the end of another rank is noticed only by the process group, within its timeout"
                )
                return
        self._detector = Detector(
            strategy.global_rank,
            # Lightning's records of the run; without the stack
            partial(activity.doing_in, (), trainer),
            partial(activity.doing_of_thread, threading.get_ident(), trainer),
            **self._limits,
            listener=listener,
            link=link,
            token=token,
            children=self._adopt() if first else (),
        )

    def _adopt(self) -> list[Any]:
        """Take the child processes from Lightning's observer, which would kill this one before it can report."""
        launcher = self._strategy.launcher
        observed = getattr(launcher, "procs", None)
        if self._strategy._start_method != "popen" or not observed:
            return []
        # the observer stops when its list is empty; the launcher needs a list to forward signals
        self._adopted = launcher.procs = list(observed)  # type: ignore[union-attr]
        observed.clear()
        return self._adopted

    def _end_on_sigterm(self, trainer: pl.Trainer) -> None:
        """Make SIGTERM raise at once; Lightning's handler would wait for a broadcast that may never come.

        An optimiser's step that has begun is completed first, because a callback may save a checkpoint.
        """
        connector = trainer._signal_connector
        self._ends_soon = False

        def end(signum: int, frame: FrameType | None) -> None:
            if connector.received_sigterm:
                return
            connector.received_sigterm = True
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGTERM)
            before = connector._original_handlers.get(signal.SIGTERM)
            if callable(before) and before is not signal.default_int_handler:
                before(signum, frame)  # type: ignore[arg-type]
            if self._stepping:
                self._ends_soon = True
                return
            raise SIGTERMException(launchers.STATUS_OF_SIGTERM)

        connector._sigterm_notifier_fn = end  # type: ignore[method-assign, assignment]

    def whole_step(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        """Run an optimiser's step; a SIGTERM that arrives after parameters may have changed is raised after the step.

        During the first run of the closure (forward and backward) parameters have not changed.
        """
        begun = False

        def interruptible() -> Any:
            nonlocal begun
            self._stepping = begun
            result = closure()
            self._stepping = begun = True
            return result

        self._stepping = True
        try:
            output = step(interruptible)
        finally:
            self._stepping = False
        if self._ends_soon:
            self._ends_soon = False
            raise SIGTERMException(launchers.STATUS_OF_SIGTERM)
        return output

    @contextmanager
    def saving(self) -> Generator[None, None, None]:
        """Wrap a save: if a callback fails to save after an error, report the original error."""
        try:
            yield
        except AmpError as error:
            # the save error stops the callbacks' `on_exception`, so Lightning does not call that of the strategy
            trainer, cause = self._trainer, error.__context__
            if cause is not None and trainer is not None and trainer.interrupted:
                self._strategy.on_exception(cause)
            raise

    def tell(self, exception: BaseException) -> None:
        """Report which rank failed, here and to the other ranks; called by the strategy's `on_exception`."""
        rank, launcher = self._strategy.global_rank, self._strategy.launcher
        # at exit, python collects garbage among all objects of torch, which takes more than a second
        atexit.register(gc.freeze)
        if isinstance(exception, KeyboardInterrupt) and isinstance(launcher, launchers.InterruptibleLauncher):
            launcher.last_words = launchers.how_to_resume(self._trainer) if rank == 0 else ""
        if isinstance(exception, SIGTERMException) and not _requeues_on_sigterm(self._strategy.cluster_environment):
            # Lightning ends with status 0, as if the fit were complete: a dependent job would start
            exception.code = launchers.STATUS_OF_SIGTERM
            if rank == 0 and (words := launchers.how_to_resume(self._trainer)):
                say(words)
        if self._detector is None:
            # ranks are not connected yet; the others would wait for this one
            for process in self._adopt():
                process.terminate()
                try:
                    process.wait(timeout=GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            return
        # a broken collective is the consequence of another rank's end, whose report may still arrive
        fault = self._detector.cause() if activity.is_of_communication(exception) else self._detector.fault
        # every rank raises these errors with the same text, so no rank needs to report another one
        of_all = isinstance(exception, launchers.OF_ALL_RANKS)
        if fault is not None and fault.rank != rank:
            if not (of_all and fault.what.endswith(activity.text_of(exception))):
                say(f"rank {rank} ends: {fault}")
                if activity.is_of_communication(exception):
                    # the traceback of the broken collective does not help, and would hide the message
                    exception.__traceback__ = exception.__cause__ = exception.__context__ = None
                if isinstance(exception, RuntimeError):
                    own_words = activity.text_of(exception).partition(". ")[0]
                    exception.args = (f"{fault}; rank {rank} ends with it, of {own_words}",)
            return
        frames = StackSummary.extract(walk_tb(exception.__traceback__), lookup_lines=False)
        doing = activity.doing_in(reversed(frames), self._trainer)
        what = f"failed {doing}: {activity.text_of(exception)}"
        if isinstance(exception, SIGTERMException | KeyboardInterrupt):
            signalled = isinstance(exception, SIGTERMException)
            what = f"{'received SIGTERM' if signalled else 'was interrupted'} {doing}"
        own = activity.Fault(
            rank=rank, host=activity.this_host(), what=what, interrupted=isinstance(exception, KeyboardInterrupt)
        )
        self._detector.tell(own)
        if not of_all:
            over = self._detector.ended_ranks() if activity.is_of_communication(exception) else []
            say(f"{own}{f'; ranks {over} had ended their run before' if over else ''}")

    @contextmanager
    def teardown(self) -> Generator[None, None, None]:
        """Wrap the strategy's teardown, and stop the detector afterwards, also if that raises."""
        failed = True
        try:
            yield
            # if ranks are forked, this process has no run
            failed = self._trainer is not None and self._trainer.interrupted
        finally:
            self.end(failed=failed)

    def end(self, *, failed: bool) -> None:
        """Stop the detector; after a failure also end the processes that rank 0 has started."""
        if self._detector is None:
            return
        detector, self._detector = self._detector, None
        detector.stop(failed=failed)
        if self._adopted is not None and all(child.poll() is None for child in self._adopted):
            launch_process_observer(self._adopted)
        self._adopted = None


def _requeues_on_sigterm(environment: ClusterEnvironment | None) -> bool:
    """Whether SLURM requeues the job on SIGTERM, which Lightning handles."""
    return (
        isinstance(environment, SLURMEnvironment)
        and environment.auto_requeue
        and environment.requeue_signal == signal.SIGTERM
    )
