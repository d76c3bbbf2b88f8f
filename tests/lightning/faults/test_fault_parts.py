"""Claim: the parts that end a run do so whatever fails beside them, and end no run that is sound: a pause, an error
that the user catches, a stranger on the port, a file system without locks, a save or a SIGTERM at a bad moment.

No process is started but for one run of two ranks.
"""

import contextlib
import errno
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_amp.errors import PlanError
from lightning_amp.lightning.faults.activity import Doing, Fault, doing_of_thread
from lightning_amp.lightning.faults.detector import Detector
from lightning_amp.lightning.faults.failure_watch import FailureWatch, _requeues_on_sigterm
from lightning_amp.lightning.faults.launchers import STARTED_BY
from lightning_amp.lightning.faults.link import LONGEST_HELLO, Link, connect, listen
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import QUIET
from tests.lightning.faults.fault_cases import Case, run_group

# it measures seconds of several processes
pytestmark = pytest.mark.alone


def until(come: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def watching(lost_after: float = 100.0) -> Iterator[tuple[Detector, int]]:
    """Rank 0's watch and its port."""
    listener = listen("localhost")
    limits = {"lost_after": lost_after, "stuck_after": 100}
    watch = Detector(0, Doing, **limits, listener=listener, link=None, token="t")
    try:
        yield watch, listener.getsockname()[1]
    finally:
        watch.stop(failed=False)


# --- the watch ---


def test_a_pause_of_the_process_is_not_the_silence_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(lost_after=1) as (watch, port):
        link = connect("localhost", port, timeout=5)
        link.send(hello=1, token="t", host="x")
        until(lambda: 1 in watch._seen)
        select, paused = watch._selector.select, threading.Event()

        def pause(timeout: float) -> Any:
            monkeypatch.undo()
            time.sleep(1.5)
            paused.set()
            return select(timeout)

        monkeypatch.setattr(watch._selector, "select", pause)
        paused.wait(5)
        time.sleep(0.5)
        assert watch.fault is None
        until(lambda: watch.fault)
        link.close()


def trainer_of(strategy: AMPStrategy) -> Trainer:
    """A Trainer that has been interrupted."""
    trainer = Trainer(accelerator="cpu", devices=1, **QUIET)
    strategy._lightning_module = LightningModule()
    strategy._lightning_module.trainer = trainer
    trainer.state.status = TrainerStatus.INTERRUPTED
    return trainer


@contextlib.contextmanager
def standing_in(depth: int) -> Iterator[int]:
    """A thread that stands in a hook, so many functions deep; its number."""
    there, over = threading.Event(), threading.Event()

    def inside(left: int) -> None:
        if left:
            return inside(left - 1)
        there.set()
        over.wait()
        return None

    def training_step() -> None:
        inside(depth)

    thread = threading.Thread(target=training_step)
    thread.start()
    assert there.wait(5)
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        over.set()
        thread.join()


def test_a_look_makes_no_frame_objects_of_a_thread_that_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torch's dispatch modes these lead to memory that is used again: crashes, and ranks that hang."""
    monkeypatch.delattr(sys, "_current_frames")
    with standing_in(5) as thread:
        seen = doing_of_thread(thread, None)
        assert seen.hook == "training_step"
        assert re.fullmatch(r"test_fault_parts.py:\d+ in inside", seen.where)


def test_a_stranger_s_lines_are_short_and_not_deep() -> None:
    for sent, received in (
        (b"[" * 4000 + b"\n", None),
        (b" " * (LONGEST_HELLO + 10), None),
        (b'{"hello": 1}\n{"doing": ', [{"hello": 1}]),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:
            raw = socket.create_connection(server.getsockname())
            link = Link(server.accept()[0])
        raw.sendall(sent)
        assert link.receive() == received
        link.close()
        raw.close()


def test_a_connection_that_cannot_be_accepted_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def full(self: socket.socket) -> Any:
        tried.set()
        raise OSError(errno.EMFILE, "too many open files")

    with watching() as (watch, port):
        monkeypatch.setattr(socket.socket, "accept", full)
        link = connect("localhost", port, timeout=5)
        link.send(hello=1, token="t", host="x")
        assert tried.wait(5)
        monkeypatch.undo()
        until(lambda: 1 in watch._seen)
        link.send(bye=True)
        until(lambda: watch.ended_ranks())
        link.close()


def test_a_stranger_on_the_watch_s_port_is_not_listened_to() -> None:
    with watching(lost_after=4) as (watch, port):
        for message in ({"hello": 1, "token": "guess", "host": "x"}, {"fault": {"rank": 1, "host": "x", "what": "y"}}):
            link = connect("localhost", port, timeout=5)
            link.send(**message)
            assert link.receive() is None, "it hangs up"
            link.close()
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert Link(raw).receive() is None
        assert watch.fault is None


def test_a_rank_that_ends_well_is_no_fault() -> None:
    with watching(lost_after=1) as (first, port):
        link = connect("localhost", port, timeout=5)
        second = Detector(1, Doing, lost_after=1, stuck_after=100, listener=None, link=link, token="t")
        time.sleep(0.3)
        second.stop(failed=False)
        time.sleep(1.5)
        assert first.fault is None
        assert first.ended_ranks() == [1]


# --- saving and SIGTERM ---


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PlanError("unlike"), []),
        (PlanError("like no other"), ["rank 1 ends: rank 0 (vm) failed in setup: PlanError: unlike"]),
        (ValueError("unlike"), ["rank 1 ends: rank 0 (vm) failed in setup: PlanError: unlike"]),
    ],
)
def test_what_all_ranks_raise_is_said_by_the_error_alone_whoever_is_first(
    error: Exception, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, said = AMPStrategy(), []
    trainer_of(strategy)
    heard = Fault(rank=0, host="vm", what="failed in setup: PlanError: unlike")
    strategy._failures._detector = SimpleNamespace(fault=heard)  # type: ignore[assignment]
    monkeypatch.setattr(AMPStrategy, "global_rank", 1)
    monkeypatch.setattr("lightning_amp.lightning.faults.failure_watch.say", said.append)
    strategy.on_exception(error)
    assert said == says


@pytest.mark.parametrize(("calls", "at", "taken"), [(1, 1, False), (1, 0, True), (0, 0, True), (3, 2, True)])
def test_a_step_that_has_begun_is_taken_to_its_end(
    monkeypatch: pytest.MonkeyPatch, calls: int, at: int, taken: bool
) -> None:
    """Asked to end in the closure's call number `at`, or after all calls."""
    strategy, steps, called = AMPStrategy(), [], []
    trainer = trainer_of(strategy)
    strategy._failures._end_on_sigterm(trainer)
    end = trainer._signal_connector._sigterm_notifier_fn

    def closure() -> None:
        called.append(1)
        if len(called) == at:
            end(signal.SIGTERM, None)

    def step(self: Any, optimizer: Any, closure: Callable[[], Any], *_: Any) -> None:
        for _ in range(calls):
            closure()
        if not at:
            end(signal.SIGTERM, None)
        steps.append(1)

    monkeypatch.setattr(DDPStrategy, "optimizer_step", step)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    with pytest.raises(SIGTERMException) as caught:
        strategy.optimizer_step(optimizer, closure)
    assert caught.value.code == 143
    assert bool(steps) == taken
    assert not strategy._failures._stepping


@pytest.mark.parametrize(
    ("environment", "code"), [(None, 143), (SLURMEnvironment(requeue_signal=signal.SIGTERM), None)]
)
def test_one_rank_ends_with_143_after_sigterm_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, environment: Any, code: int | None
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    strategy, spoken = AMPStrategy(cluster_environment=environment), []
    trainer = trainer_of(strategy)
    trainer.state.fn = "fit"
    monkeypatch.setattr("lightning_amp.lightning.faults.failure_watch.say", spoken.append)
    error = SIGTERMException()
    strategy.on_exception(error)
    assert error.code == code
    assert [text for text in spoken if "interrupted; no checkpoint has been written" in text] == spoken[: bool(code)]


@pytest.mark.parametrize(
    ("ranks", "environment", "ours"),
    [
        (1, None, False),
        (2, None, True),
        (2, SLURMEnvironment(requeue_signal=signal.SIGTERM), False),
        (2, SLURMEnvironment(requeue_signal=signal.SIGUSR1), True),
        (2, SLURMEnvironment(auto_requeue=False, requeue_signal=signal.SIGTERM), True),
    ],
)
def test_sigterm_is_lightning_s_where_it_queues_again_or_there_is_one_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int, environment: Any, ours: bool
) -> None:
    strategy = AMPStrategy(cluster_environment=environment)
    trainer = trainer_of(strategy)
    before = trainer._signal_connector._sigterm_notifier_fn
    monkeypatch.setattr(AMPStrategy, "world_size", ranks)
    monkeypatch.setattr(FailureWatch, "_begin", lambda *_: None)
    strategy._failures.connected()
    assert (trainer._signal_connector._sigterm_notifier_fn != before) == ours
    assert _requeues_on_sigterm(environment) == (ranks == 2 and not ours)


# --- ranks that start ---


@pytest.mark.long
def test_a_checkpoint_on_one_rank_s_exception_does_not_hide_it(tmp_path: Path) -> None:
    outcome = run_group(Case(1, "training_step", "raise", saves_on_exception=True), tmp_path)
    assert outcome.left == []
    assert all(outcome.statuses)
    assert outcome.seconds < 30
    for text in outcome.texts:
        assert "rank 1 " in text
        assert "failed in training_step (epoch 0, batch 5), at fault_cases.py" in text
        assert "ValueError: boom" in text


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of no rank."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def watch_of(**launcher: Any) -> FailureWatch:
    strategy: Any = SimpleNamespace(
        global_rank=1, launcher=SimpleNamespace(**launcher), lightning_module=None, _start_method="popen"
    )
    return FailureWatch(strategy, lost_after=60, stuck_after=60)


@pytest.mark.parametrize("reaped", [True, False])
def test_a_rank_that_starts_ends_with_the_process_that_has_started_it(
    reaped: bool, sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was alive 15 minutes later, waiting for rank 0."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setenv(STARTED_BY, str(sleeper.pid))
    with watch_of().starting():
        time.sleep(0.1)
        assert not ended
        sleeper.kill()
        if reaped:
            sleeper.wait()
        until(lambda: ended)
    assert ended == [1]
    said = f"rank 1 ends: process {sleeper.pid}, which has started it, ended before the ranks were connected"
    assert said in capfd.readouterr().err


def test_a_rank_that_is_connected_outlives_the_process_that_has_started_it(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os._exit", lambda status: pytest.fail("it is connected"))
    monkeypatch.setenv(STARTED_BY, str(sleeper.pid))
    before = threading.active_count()
    with watch_of().starting():
        assert threading.active_count() == before + 1
    sleeper.kill()
    until(lambda: threading.active_count() == before)


@pytest.mark.parametrize("deaf", [True, False])
def test_a_rank_that_fails_before_the_others_are_connected_ends_those_that_it_has_started(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_amp.lightning.faults.failure_watch.GRACE_S", 0.3)
    command = "trap '' TERM; echo; while true; do sleep 0.1; done" if deaf else "echo; exec sleep 60"
    started = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    observed = [started]
    watch_of(procs=observed).tell(ValueError("boom"))
    started.stdout.close()
    assert started.wait(timeout=5) == -(signal.SIGKILL if deaf else signal.SIGTERM)
    # else Lightning's observer would end this process too
    assert observed == []
