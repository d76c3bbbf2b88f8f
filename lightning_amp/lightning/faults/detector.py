"""Detect failed ranks by heartbeats to rank 0 over TCP; the other ranks report which rank failed and why, and exit.

    every rank <-> rank 0          a TCP connection with a daemon thread at either end
    once a second                  a rank reports its hook and batch, and since when; after some seconds, also its stack
    a rank raises                  it reports the error before it exits; rank 0 forwards the report
    a rank is killed               the kernel closes its connection
    a rank or its machine hangs    no message for `lost_after` seconds
    a rank is stuck                `stuck_after` seconds in one hook and batch, not waiting for others; or all wait

After a report, a rank has `GRACE_S` to raise an error itself, as it does in a broken collective. Then its detector ends
the process, because a main thread that waits in a collective cannot be interrupted. After an interrupt by the user, the
time is `INTERRUPTED_GRACE_S`. A rank that has raised by then has `lost_after` seconds for its callbacks and loggers.
Ranks that finish report so. Time in which the process itself was paused does not count, because it could not receive.

The process group's store cannot carry this: it does not say that a client has ended, so that a killed rank would be
silent for `lost_after`; and when rank 0, which serves it, ends, every other client prints a stack of torch's C++ code.

Known limits: a stuck rank is detected only after its first batch has begun; before that, the process group's timeout
applies. If ranks are on several machines, the detector needs a free port between them, as the process group does.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from lightning_amp.lightning.faults.activity import Doing, Fault, text_of, this_host
from lightning_amp.lightning.faults.link import Link

GRACE_S = 3.0
INTERRUPTED_GRACE_S = 0.5
CAUSE_S = 3.0
"""Seconds for which a rank whose collective broke waits for a report of the cause."""
EXIT_STATUS = 1
SLOW_S = 5.0
"""Seconds without progress after which a rank's stack is read; each further time is 1.5 times as late as the last."""
NEAR = 0.8
"""Share of `stuck_after` from which the stack is read every time, to show which rank waits for which."""
FLUSH_S = 1.0
PAUSE_TICKS = 3
"""If waiting for messages took more ticks than this, the process was paused."""


@dataclass
class _Seen:
    """Last known state of another rank."""

    link: Link
    heard: float
    host: str = "machine not known"
    doing: str = "before its first word"
    waiting: bool = False
    idle: float = 0.0
    over: bool = False


class Detector:
    """Failure detector of one rank, in a thread.

    Args:
        look: Function that returns the activity of the main thread.
        look_closely: The same, with its stack.
        lost_after, stuck_after: Seconds after which a rank counts as lost, and as stuck.
        listener: On rank 0, the socket to which the others connect.
        link: On other ranks, the connection to rank 0.
        token: Secret of the run, which a rank must send first.
        children: On rank 0, the processes of ranks 1, 2, ... if it has started them itself.
    """

    def __init__(
        self,
        rank: int,
        look: Callable[[], Doing],
        look_closely: Callable[[], Doing] | None = None,
        *,
        lost_after: float,
        stuck_after: float,
        listener: socket.socket | None,
        link: Link | None,
        token: str,
        children: Sequence["subprocess.Popen[Any]"] = (),
    ) -> None:
        self.fault: Fault | None = None
        self._rank, self._look, self._token = rank, look, token
        self._lost_after, self._stuck_after = lost_after, stuck_after
        self._look_closely, self._next_close = look_closely or look, SLOW_S
        self._children = list(children)
        self._seen: dict[int, _Seen] = {}
        self._known, self._over = threading.Event(), threading.Event()
        self._learned = self._said = 0.0
        self._last: tuple[Any, ...] = ()
        self._since, self._doing = time.monotonic(), Doing()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, None)
        self._listener = listener
        if link is not None:
            self._add(0, link)
            link.send(hello=rank, token=token, host=this_host())
        # several messages fit into either limit, so that a single delay does not count as a failure
        self._tick = min(1.0, lost_after / 4, stuck_after / 4)
        self._thread = threading.Thread(target=self._run, daemon=True, name="lightning_amp-watch")
        self._thread.start()

    # --- called by the main thread ---

    def cause(self) -> Fault | None:
        """Return the fault of another rank, for an error that may be its consequence; waits for it up to `CAUSE_S`."""
        self._known.wait(CAUSE_S)
        return self.fault

    def tell(self, fault: Fault) -> None:
        """Report to all ranks that this one exits."""
        for seen in list(self._seen.values()):
            seen.link.send(fault=vars(fault))

    def ended_ranks(self) -> list[int]:
        """Return the ranks that have finished without an error."""
        return sorted(rank for rank, seen in self._seen.items() if seen.over)

    def stop(self, *, failed: bool) -> None:
        """Stop the detector at the end of this rank's run; after a failure, also end processes started by rank 0."""
        for seen in list(self._seen.values()):
            seen.link.send(bye=True)
        if (failed or self.fault) and self._children:
            self._end_children()
        self._over.set()
        # the thread may have stopped already, and closed the socket
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout=GRACE_S)

    # --- the detector's thread ---

    def _run(self) -> None:
        try:
            self._look_after()
        except Exception as error:
            say(
                f"rank {self._rank}'s failure detector has ended ({text_of(error)}); faults are noticed by the process"
                " group only"
            )
            for seen in self._seen.values():
                seen.link.send(bye=True)
        for seen in self._seen.values():
            seen.link.close()
        for sock in (self._listener, self._wake, self._woken):
            if sock is not None:
                sock.close()
        self._selector.close()

    def _look_after(self) -> None:
        """Receive and send messages, and end the process if another rank failed and the main thread does not exit."""
        while not self._over.is_set():
            before = time.monotonic()
            # more often after a fault, because `_is_due` then uses fractions of a second
            ready = self._selector.select(self._tick if self.fault is None else INTERRUPTED_GRACE_S / 4)
            gap = time.monotonic() - before
            if gap > PAUSE_TICKS * self._tick:
                # the process was paused: it could not receive, and other ranks may have been paused too
                self._since += gap
                self._learned += gap
                for seen in self._seen.values():
                    seen.heard += gap
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, int | Link):
                    self._hear(key.data)
            if time.monotonic() - self._said >= self._tick and not self._over.is_set():
                self._said = time.monotonic()
                self._speak()
                self._look_around()
            if self.fault is not None and self._is_due() and not self._over.is_set():
                self._leave(self.fault)

    def _is_due(self) -> bool:
        """Whether the grace period of the main thread is over; the user's code may catch what it has raised."""
        waited = time.monotonic() - self._learned
        grace = INTERRUPTED_GRACE_S if self.fault is not None and self.fault.interrupted else GRACE_S
        return waited > grace and (waited > self._lost_after or not self._look().unwinding)

    def _accept(self) -> None:
        assert self._listener is not None, "rank 0 has one"
        try:
            link = Link(self._listener.accept()[0])
        except OSError:
            # no file descriptor is free, or the client has left; the listener may stay ready, so wait a little
            time.sleep(self._tick / 10)
            return
        self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _add(self, rank: int, link: Link, host: str = "") -> None:
        link.trust()
        self._seen[rank] = _Seen(link=link, heard=time.monotonic(), host=host or "rank 0's machine")
        if link.sock in self._selector.get_map():
            self._selector.modify(link.sock, selectors.EVENT_READ, rank)
        else:
            self._selector.register(link.sock, selectors.EVENT_READ, rank)

    def _hear(self, who: int | Link) -> None:
        link = who if isinstance(who, Link) else self._seen[who].link
        messages = link.receive()
        for message in messages or ():
            if isinstance(who, Link):
                # a new connection must send the run's token first; other clients of the port are closed
                if message.get("token") != self._token:
                    messages = None
                    break
                who = int(message["hello"])
                self._add(who, link, str(message["host"]))
                # `_learn` has sent the fault once, to the ranks that were connected then
                if self.fault is not None:
                    link.send(fault=vars(self.fault))
            else:
                self._take(who, message)
        if messages is None:
            self._selector.unregister(link.sock)
            link.close()
            if isinstance(who, int) and not self._seen[who].over:
                self._seen[who].over = True
                self._learn(self._gone(who))

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        seen = self._seen[rank]
        seen.heard = time.monotonic()
        if "doing" in message:
            seen.doing, seen.waiting = str(message["doing"]), bool(message["waiting"])
            seen.idle, seen.host = float(message["idle"]), str(message["host"])
        if "fault" in message:
            fault = Fault(**message["fault"])
            # a rank that reports its own fault exits by itself; nothing more is expected from it
            seen.over = seen.over or fault.rank == rank
            self._learn(fault)
        if "bye" in message:
            seen.over = True

    def _speak(self) -> None:
        doing = self._look()
        now = time.monotonic()
        state = (doing.hook, doing.place, doing.batches)
        if state != self._last or not doing.batches:
            self._last, self._since = state, now
            self._doing, self._next_close = doing, SLOW_S
        self._idle = now - self._since
        if self._idle >= self._next_close or self._idle >= NEAR * self._stuck_after:
            # the stack is read rarely, because reading can crash the process: see activity.py
            self._doing, self._next_close = self._look_closely(), 1.5 * self._idle
        for seen in self._seen.values():
            seen.link.send(doing=str(self._doing), waiting=bool(self._doing.waiting), idle=self._idle, host=this_host())

    def _look_around(self) -> None:
        """Detect silent ranks; on rank 0 also stuck ones."""
        now = time.monotonic()
        for rank, seen in self._seen.items():
            if not seen.over and now - seen.heard > self._lost_after:
                what = f"has not been heard of for {now - seen.heard:.0f} s; it was last {seen.doing}"
                self._learn(Fault(rank=rank, host=seen.host, what=what))
        if self._rank != 0:
            return
        me = (0, this_host(), str(self._doing), bool(self._doing.waiting), self._idle)
        others = [(r, s.host, s.doing, s.waiting, s.idle) for r, s in self._seen.items() if not s.over]
        ranks = [me, *others]
        slow = [row for row in ranks if row[4] > self._stuck_after]
        stuck = [row for row in slow if not row[3]]
        if stuck or (slow and len(slow) == len(ranks)):
            rank, host, doing, _, idle = (stuck or slow)[0]
            rest = "; ".join(f"rank {row[0]} {row[2]}" for row in ranks if row[0] != rank)
            what = f"has made no progress for {idle:.0f} s {doing}; elsewhere: {rest}"
            self._learn(Fault(rank=rank, host=host, what=what))

    def _gone(self, rank: int) -> Fault:
        seen = self._seen[rank]
        how = "ended without a word"
        if 0 < rank <= len(self._children):
            try:
                status = self._children[rank - 1].wait(timeout=0.5)
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            except subprocess.TimeoutExpired:
                how = "closed its connection"
        what = (
            f"{how}; {time.monotonic() - seen.heard:.1f} s before it was {seen.doing}. It was killed from outside,"
            " or by the kernel for want of memory"
        )
        return Fault(rank=rank, host=seen.host, what=what)

    def _learn(self, fault: Fault) -> None:
        """Store and forward the first fault; later ones are its consequences."""
        if self.fault is not None:
            return
        self.fault, self._learned = fault, time.monotonic()
        self._known.set()
        if self._rank == 0:
            for seen in self._seen.values():
                seen.link.send(fault=vars(fault))

    def _leave(self, fault: Fault) -> None:
        """End the process, regardless of what its main thread waits for."""
        try:
            say(f"rank {self._rank} ends: {fault}")
            self._end_children()
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            # in another thread, because the stuck thread may hold the stream's lock
            flush = threading.Thread(target=_flush, daemon=True)
            flush.start()
            flush.join(timeout=FLUSH_S)
        finally:
            os._exit(EXIT_STATUS)

    def _end_children(self) -> None:
        """Wait for the ranks that this process has started, then kill those still running."""
        # one second longer than a rank's own detector waits, so that the rank can report the reason first
        until = time.monotonic() + GRACE_S + 1.0
        for rank, child in enumerate(self._children, start=1):
            while child.poll() is None and not self._is_over(rank) and time.monotonic() < until:
                time.sleep(0.05)
            if child.poll() is None and not self._is_over(rank):
                child.kill()

    def _is_over(self, rank: int) -> bool:
        return rank in self._seen and self._seen[rank].over


def say(text: str) -> None:
    """Write one line to standard error, bypassing the buffers of the main thread."""
    # a closed stream must not keep a rank from exiting
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"lightning_amp: {text}\n".encode())


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
