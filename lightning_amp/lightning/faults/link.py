"""Exchange JSON messages, one per line, between the failure detectors of two ranks.

Messages are never executed or unpickled. A connection is trusted only after it has sent the run's token.
"""

import json
import os
import socket
import threading
import weakref
from contextlib import suppress
from typing import Any

SEND_S = 5.0
LONGEST_LINE = 1 << 20
LONGEST_HELLO = 1 << 12
"""Longest line of a connection that has not sent the token yet, in bytes."""
READ = 1 << 16
LOOPBACK = ("localhost", "127.0.0.1")


_open: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _close_inherited() -> None:
    for link in list(_open):
        link.sock.close()


# otherwise a loader worker that outlives its rank would keep the connection open, and the rank would seem alive
os.register_at_fork(after_in_child=_close_inherited)


class Link:
    """One end of a connected socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        _open.add(self)
        self._rest = b""
        self._longest = LONGEST_HELLO
        self._lock = threading.Lock()
        sock.settimeout(SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self) -> None:
        """Allow long lines, once the other end is known to be a rank of this run."""
        self._longest = LONGEST_LINE

    def send(self, **message: Any) -> None:
        """Send an object, from any thread. If the other end has closed, nothing is sent, and `receive` returns None."""
        line = json.dumps(message).encode() + b"\n"
        with suppress(OSError), self._lock:
            self.sock.sendall(line)

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the objects received, once the socket is readable; None if the other end has closed."""
        try:
            data = self.sock.recv(min(READ, self._longest))
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or max(map(len, (*lines, self._rest))) >= self._longest:
            return None
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return [message for message in found if isinstance(message, dict)]

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def listen(address: str) -> socket.socket:
    """Return a listening socket on a free port: local if all ranks are on this machine, else on all its addresses.
    `address`: address of the first rank's machine in the cluster environment.
    """
    if address in LOOPBACK:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def connect(address: str, port: int, *, timeout: float) -> Link:
    """Connect to a listening rank; tries for `timeout` seconds."""
    host = "127.0.0.1" if address in LOOPBACK else address
    return Link(socket.create_connection((host, port), timeout=timeout))
