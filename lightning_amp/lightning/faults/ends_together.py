"""A strategy whose ranks end together, each with a message that names the rank whose fault it was."""

import atexit
import gc
import secrets
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.optim import Optimizer

from lightning_amp.errors import AmpError, InstallError, PlanError
from lightning_amp.lightning._compat import ScriptLauncher, launch_process_observer, trainer_of
from lightning_amp.lightning.faults.activity import doing_of_exception, doing_of_thread
from lightning_amp.lightning.faults.fault import Fault, is_of_communication, text_of, this_host
from lightning_amp.lightning.faults.interrupt import InterruptibleLauncher, how_to_resume
from lightning_amp.lightning.faults.link import Link, connect, listen
from lightning_amp.lightning.faults.watch import Limits, Watch, say

CONNECT_S = 20.0
STATUS_OF_SIGTERM = 128 + signal.SIGTERM


class EndsTogether(DDPStrategy):
    """Watches the other ranks from the moment that the processes are connected until the run has ended."""

    _limits: Limits
    _watch: Watch | None = None
    _adopted: list[Any] | None = None
    _stepping: bool = False
    """Whether an optimiser may have changed some of the parameters and not yet the others."""
    _asked_to_end: bool = False
    """Whether SIGTERM has come meanwhile."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if type(self._launcher) is ScriptLauncher:
            self._launcher.__class__ = InterruptibleLauncher

    def setup_environment(self) -> None:
        """Connect the processes, and let them watch each other."""
        super().setup_environment()
        trainer = trainer_of(self.lightning_module)
        if trainer is not None and self.world_size > 1 and not _requeues_on_sigterm(self.cluster_environment):
            self._end_on_sigterm(trainer)
        if self.world_size > 1:
            self._begin_watch(trainer)

    def _begin_watch(self, trainer: pl.Trainer | None) -> None:
        assert self.cluster_environment is not None, "the Trainer sets the environment"
        self._end_watch(failed=False)
        address = self.cluster_environment.main_address
        first = self.global_rank == 0
        listener = listen(address) if first else None
        port = listener.getsockname()[1] if listener else 0
        port, token = self.broadcast((port, secrets.token_hex(16)))
        link = None if first else _link_to_first(address, port, rank=self.global_rank)
        if link is None and not first:
            return
        look = partial(doing_of_thread, threading.get_ident(), trainer)
        self._watch = Watch(
            self.global_rank,
            look,
            limits=self._limits,
            listener=listener,
            link=link,
            token=token,
            children=self._adopt() if first else (),
        )

    def _adopt(self) -> list[Any]:
        """Take the launcher's processes from Lightning's observer, which would kill this one before it can speak."""
        observed = getattr(self._launcher, "procs", None)
        if self._start_method != "popen" or not observed:
            return []
        # the observer ends when its list is empty; the launcher needs one to pass signals on
        self._adopted = self._launcher.procs = list(observed)  # type: ignore[union-attr]
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
            raise SIGTERMException(STATUS_OF_SIGTERM)

        connector._sigterm_notifier_fn = end  # type: ignore[method-assign, assignment]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; asked by SIGTERM to end once parameters may have changed, end after it.

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
            output = super().optimizer_step(optimizer, interruptible, model, **kwargs)
        finally:
            self._stepping = False
        if self._asked_to_end:
            self._asked_to_end = False
            raise SIGTERMException(STATUS_OF_SIGTERM)
        return output

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; if a callback saves after an error and cannot, the error is told, not its consequence."""
        try:
            return super().lightning_module_state_dict()
        except AmpError as error:
            # it ends the callbacks' `on_exception`, and Lightning does not come to the strategy's
            trainer, cause = trainer_of(self.lightning_module), error.__context__
            if cause is not None and trainer is not None and trainer.interrupted:
                self.on_exception(cause)
            raise

    def on_exception(self, exception: BaseException) -> None:
        """Say whose fault it is, here and to the other ranks."""
        super().on_exception(exception)
        # when python ends, it looks through all of torch for garbage, which takes more than a second
        atexit.register(gc.freeze)
        if isinstance(exception, KeyboardInterrupt) and isinstance(self._launcher, InterruptibleLauncher):
            trainer = trainer_of(self.lightning_module)
            self._launcher.last_words = how_to_resume(trainer) if self.global_rank == 0 else ""
        if self._watch is None:
            return
        fault = self._watch.cause() if is_of_communication(exception) else self._watch.fault
        # these are raised on every rank with the same text, which has all that a person needs
        of_all = isinstance(exception, PlanError | InstallError)
        if fault is not None and fault.rank != self.global_rank:
            if not (of_all and fault.what.endswith(text_of(exception))):
                self._blame(exception, fault)
            return
        doing = doing_of_exception(exception, trainer_of(self.lightning_module))
        own = Fault(
            rank=self.global_rank,
            host=this_host(),
            what=_what(exception, str(doing)),
            asked=isinstance(exception, KeyboardInterrupt),
        )
        self._watch.tell(own)
        if not of_all:
            over = self._watch.ended_ranks() if is_of_communication(exception) else []
            say(f"{own}{f'; ranks {over} had ended their run before' if over else ''}")

    def _blame(self, exception: BaseException, fault: Fault) -> None:
        say(f"rank {self.global_rank} ends: {fault}")
        if is_of_communication(exception):
            # where this rank waited for the other is no news, and would bury the message under a hundred lines
            exception.__traceback__ = exception.__cause__ = exception.__context__ = None
        if isinstance(exception, RuntimeError):
            own = text_of(exception).partition(". ")[0]
            exception.args = (f"{fault}; rank {self.global_rank} ends with it, of {own}",)

    def teardown(self) -> None:
        """Tear down, and end the watch last, whatever comes of that."""
        failed = True
        try:
            super().teardown()
            # where ranks are forks of it, this process has no run of its own
            trainer = trainer_of(self.lightning_module)
            failed = trainer is not None and trainer.interrupted
        finally:
            self._end_watch(failed=failed)

    def _end_watch(self, *, failed: bool) -> None:
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        watch.stop(failed=failed)
        if self._adopted is not None and all(child.poll() is None for child in self._adopted):
            launch_process_observer(self._adopted)
        self._adopted = None


def _link_to_first(address: str, port: int, *, rank: int) -> Link | None:
    try:
        return connect(address, port, timeout=CONNECT_S)
    except OSError as error:
        say(
            f"rank {rank} cannot reach rank 0's watch at {address}:{port} ({error}); the end of another rank is noticed"
            " by the process group alone, within its timeout"
        )
        return None


def _what(exception: BaseException, doing: str) -> str:
    if isinstance(exception, SIGTERMException):
        return f"was asked to end by SIGTERM {doing}"
    if isinstance(exception, KeyboardInterrupt):
        return f"was interrupted {doing}"
    return f"failed {doing}: {text_of(exception)}"


def _requeues_on_sigterm(environment: ClusterEnvironment | None) -> bool:
    """Whether SIGTERM is the signal on which Lightning has SLURM queue the job again; that is Lightning's affair."""
    return (
        isinstance(environment, SLURMEnvironment)
        and environment.auto_requeue
        and environment.requeue_signal == signal.SIGTERM
    )
