"""End all ranks together after a failure, each with a message that names the rank at fault."""

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
"""Between two looks at the process that has started this one."""

Closure = Callable[[], Any]


class FailureWatch:
    """Watches the other ranks from the moment that the processes are connected until the run has ended.

    Args:
        strategy: Of the run, of whichever kind; it calls the methods below at the moments that they name.
        lost_after, stuck_after: Seconds after which a rank counts as lost, and as stuck.
    """

    def __init__(self, strategy: DDPStrategy, *, lost_after: float, stuck_after: float) -> None:
        self._strategy = strategy
        self._limits = {"lost_after": lost_after, "stuck_after": stuck_after}
        self._detector: Detector | None = None
        self._adopted: list[Any] | None = None
        # whether an optimiser may have changed some of the parameters and not yet the others
        self._stepping = False
        # whether SIGTERM has come meanwhile
        self._asked_to_end = False

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the strategy: the detector stays the original's."""
        return {**vars(self), "_detector": None, "_adopted": None}

    @property
    def _trainer(self) -> pl.Trainer | None:
        return trainer_of(self._strategy.lightning_module)

    @contextmanager
    def starting(self) -> Generator[None, None, None]:
        """Until this rank is connected to the others, end it if the process that has started it ends.

        Its main thread waits for that one in a collective, for as long as the process group's timeout.
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
                # a process that has ended keeps its number until it is waited for, as a zombie
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
        """Begin, once the processes are connected."""
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
            # what Lightning has noted of the run; no stack is read
            partial(activity.doing_in, (), trainer),
            partial(activity.doing_of_thread, threading.get_ident(), trainer),
            **self._limits,
            listener=listener,
            link=link,
            token=token,
            children=self._adopt() if first else (),
        )

    def _adopt(self) -> list[Any]:
        """Take the launcher's processes from Lightning's observer, which would kill this one before it can speak."""
        launcher = self._strategy.launcher
        observed = getattr(launcher, "procs", None)
        if self._strategy._start_method != "popen" or not observed:
            return []
        # the observer ends when its list is empty; the launcher needs one to pass signals on
        self._adopted = launcher.procs = list(observed)  # type: ignore[union-attr]
        observed.clear()
        return self._adopted

    def _end_on_sigterm(self, trainer: pl.Trainer) -> None:
        """Raise at once, where Lightning would wait in the signal's handler for a broadcast that may never come.

        A step that the optimiser has begun is taken to its end first: a callback may save what there is.
        """
        connector = trainer._signal_connector
        self._asked_to_end = False

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
                self._asked_to_end = True
                return
            raise SIGTERMException(launchers.STATUS_OF_SIGTERM)

        connector._sigterm_notifier_fn = end  # type: ignore[method-assign, assignment]

    def whole_step(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        """Run an optimiser's step; asked by SIGTERM to end once parameters may have changed, end after it.

        They have not while the closure, forward and backward, runs for the first time.
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
        if self._asked_to_end:
            self._asked_to_end = False
            raise SIGTERMException(launchers.STATUS_OF_SIGTERM)
        return output

    @contextmanager
    def saving(self) -> Generator[None, None, None]:
        """Around a save: if a callback saves after an error and cannot, the error is told, not its consequence."""
        try:
            yield
        except AmpError as error:
            # it ends the callbacks' `on_exception`, and Lightning does not come to the strategy's
            trainer, cause = self._trainer, error.__context__
            if cause is not None and trainer is not None and trainer.interrupted:
                self._strategy.on_exception(cause)
            raise

    def tell(self, exception: BaseException) -> None:
        """Say whose fault it is, here and to the other ranks, as the strategy's `on_exception`."""
        rank, launcher = self._strategy.global_rank, self._strategy.launcher
        # when python ends, it looks through all of torch for garbage, which takes more than a second
        atexit.register(gc.freeze)
        if isinstance(exception, KeyboardInterrupt) and isinstance(launcher, launchers.InterruptibleLauncher):
            launcher.last_words = launchers.how_to_resume(self._trainer) if rank == 0 else ""
        if self._detector is None:
            # before ranks are connected; others would wait for this one
            for process in self._adopt():
                process.terminate()
                try:
                    process.wait(timeout=GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            return
        # a broken collective is the consequence of another rank's end, of which the word may be on its way
        fault = self._detector.cause() if activity.is_of_communication(exception) else self._detector.fault
        # these are raised on every rank with the same text, which has all that a person needs
        of_all = isinstance(exception, launchers.OF_ALL_RANKS)
        if fault is not None and fault.rank != rank:
            if not (of_all and fault.what.endswith(activity.text_of(exception))):
                say(f"rank {rank} ends: {fault}")
                if activity.is_of_communication(exception):
                    # where this rank waited for the other is no news, and would bury the message under a hundred lines
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
            rank=rank, host=activity.this_host(), what=what, asked=isinstance(exception, KeyboardInterrupt)
        )
        self._detector.tell(own)
        if not of_all:
            over = self._detector.ended_ranks() if activity.is_of_communication(exception) else []
            say(f"{own}{f'; ranks {over} had ended their run before' if over else ''}")

    @contextmanager
    def teardown(self) -> Generator[None, None, None]:
        """Around the strategy's teardown: the watch ends last, whatever comes of that."""
        failed = True
        try:
            yield
            # where ranks are forks of it, this process has no run
            failed = self._trainer is not None and self._trainer.interrupted
        finally:
            self.end(failed=failed)

    def end(self, *, failed: bool) -> None:
        """Stop the detector; after a failure the processes that rank 0 has started end too."""
        if self._detector is None:
            return
        detector, self._detector = self._detector, None
        detector.stop(failed=failed)
        if self._adopted is not None and all(child.poll() is None for child in self._adopted):
            launch_process_observer(self._adopted)
        self._adopted = None


def _requeues_on_sigterm(environment: ClusterEnvironment | None) -> bool:
    """Whether SIGTERM is the signal on which Lightning has SLURM queue the job again; that is Lightning's affair."""
    return (
        isinstance(environment, SLURMEnvironment)
        and environment.auto_requeue
        and environment.requeue_signal == signal.SIGTERM
    )
