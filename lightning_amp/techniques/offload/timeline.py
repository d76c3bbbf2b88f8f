"""Define a training step as a line of moments on which tensors are saved and asked for, and what it takes with them on
the host.

Each part of what autograd keeps (a tensor, or several that are treated alike) has one of three ways:

    KEEP     it stays on the device
    HOST     it leaves when it is saved, and comes back when the backward pass asks for it
    AGAIN    it is freed, and its operators run again when the backward pass asks for it

Copies of a direction run one after the other, beside the computation. As in `Moves`, at most W bytes wait for their
copy to the host, and at most W bytes come back before anything asks for them; the device waits where more would.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEEP, HOST, AGAIN = 0, 1, 2
WAYS = KEEP, HOST, AGAIN
COPIES = 128
"""Most copies of a timeline, up to its groups."""
Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Copies between a device and its host.

    Attributes:
        out, back: Bytes per second of each direction.
        window: W, bytes.
        beside: Whether copies run beside the computation, as on a GPU.
    """

    out: float
    back: float
    window: float
    beside: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """A step, and the parts of what autograd keeps in it.

    Attributes:
        live: [moment] bytes on the device if all parts are kept.
        freed: [way, part, moment] bytes that a way of a part frees.
        part: [copy] the part that a copy to the host, and back, belongs to.
        n_bytes: [copy] its bytes.
        saved, needed: [copy] when it may begin, and has to be back: seconds from the begin of a step in which all parts
            are kept.
        again: [part] seconds of its operators; inf if they cannot run again.
        seconds: Seconds of that step.
    """

    live: Array
    freed: Array
    part: Array
    n_bytes: Array
    saved: Array
    needed: Array
    again: Array
    seconds: float

    def peak(self, ways: Sequence[int]) -> float:
        """Return the most bytes on the device, without those on their way."""
        return float(self.bytes_of(ways).max())

    def bytes_of(self, ways: Sequence[int]) -> Array:
        """Return [moment] the bytes on the device."""
        found: Array = self.live - self.freed[np.asarray(ways, int), np.arange(len(ways))].sum(0)
        return found

    @cached_property
    def _events(self) -> list[tuple[float, bool, int, int, float]]:
        """When, whether it is saved, and number, part and bytes of each copy, in the order of time."""
        # needed before saved at the same time, as of tensors that a backward pass inside the step reads
        what = list(zip(range(len(self.part)), self.part.tolist(), self.n_bytes.tolist(), strict=True))
        saved = [(at, True, *one) for at, one in zip(self.saved.tolist(), what, strict=True)]
        needed = [(at, False, *one) for at, one in zip(self.needed.tolist(), what, strict=True)]
        return sorted(saved + needed)

    def host_bytes(self, ways: Sequence[int]) -> float:
        """Return the bytes that leave."""
        found: float = self.n_bytes[np.asarray(ways, int)[self.part] == HOST].sum()
        return found

    def took(self, ways: Sequence[int], link: Link) -> float:
        """Return the seconds of the step; inf if a part that cannot run again should."""
        waited, sizes, again, ran = 0.0, self.n_bytes.tolist(), self.again.tolist(), set[int]()
        out_ends = back_ends = queued = ahead = 0.0
        # the ends of copies that the device has not waited for, storages that left, and when those on their way arrive
        queue, gone, arrives = dict[int, float](), list[int](), dict[int, float]()
        for clock, saves, i, part, size in self._events:
            way = ways[part]
            if way == AGAIN and not saves and part not in ran:
                ran.add(part)
                waited += again[part]
            if way != HOST:
                continue
            now = clock + waited
            if not link.beside:
                waited += size / (link.out if saves else link.back)
            elif saves:
                out_ends = max(out_ends, now) + size / link.out
                queue[i] = out_ends
                queued += size
                gone.append(i)
                while queued > link.window:
                    first = next(iter(queue))
                    queued -= sizes[first]
                    waited = max(waited, queue.pop(first) - clock)
            else:
                if i in queue:
                    # it is still there, until its copy has ended
                    queued -= size
                    arrives[i] = queue.pop(i)
                elif i in arrives:
                    ahead -= size
                else:
                    arrives[i] = back_ends = max(back_ends, now) + size / link.back
                waited = max(waited, arrives[i] - clock)
                now = clock + waited
                for other in reversed(gone):
                    if other in arrives or other in queue:
                        continue
                    if ahead + sizes[other] > link.window:
                        break
                    ahead += sizes[other]
                    arrives[other] = back_ends = max(back_ends, now) + sizes[other] / link.back
                while gone and gone[-1] in arrives:
                    gone.pop()
        return self.seconds + waited


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedTensors:
    """Storages that a counted step could have on the host, and its bytes while all are on the device.

    Attributes:
        live: [moment] bytes on the device; a moment is one operator.
        clock: [moment + 1] seconds before each moment, and of the step.
        sizes: Bytes of all storages that may leave, by number.
        number: [storage] of those whose leaving frees something: the number,
        n_bytes: the size,
        place: the place among the operators that a replay counts,
        saved_at: the moment at which autograd saves it,
        gone, back: and where it would be away: at the moments gone <= t < back.
    """

    live: Array
    clock: Array
    sizes: Array
    number: Array
    n_bytes: Array
    place: Array
    saved_at: Array
    gone: Array
    back: Array

    def at_least(self, n_bytes: int) -> "SavedTensors":
        """Return those of at least so many bytes, numbered without the others."""
        large = self.sizes >= n_bytes
        some = large[self.number]
        names = ("number", "n_bytes", "place", "saved_at", "gone", "back")
        kept = {name: getattr(self, name)[some] for name in names}
        kept["number"] = (np.cumsum(large) - 1)[kept["number"]]
        return replace(self, sizes=self.sizes[large], **kept)

    @cached_property
    def _spans(self) -> tuple[Array, Array]:
        """[span] most bytes of moments between which no storage leaves or comes back, and their first moments."""
        first = np.unique(np.concatenate([[0], self.saved_at + 1, self.gone, self.back]))
        first = first[first < len(self.live)]
        return np.maximum.reduceat(self.live, first), first

    def away(self, which: Sequence[int], gone: Array | int = 0, back: Array | int = 2**62) -> Array:
        """Return [span] the bytes of some storages where they are away; not before `gone`, and not after `back`."""
        _, first = self._spans
        some, found = np.asarray(which, int), np.zeros(len(first) + 1)
        ends = np.minimum(self.back[some], back)
        begins = np.minimum(np.maximum(self.gone[some], gone), ends)
        np.add.at(found, np.searchsorted(first, begins), self.n_bytes[some])
        np.add.at(found, np.searchsorted(first, ends), -self.n_bytes[some])
        return found.cumsum()[:-1]

    def peak(self, which: Sequence[int], window: float = 0) -> float:
        """Return the most bytes on the device if these storages leave, at most W bytes at once in each direction."""
        late = self._in_flight(which, window) if window else (0, 2**62)
        return float((self._spans[0] - self.away(which, *late)).max())

    def _in_flight(self, which: Sequence[int], window: float) -> tuple[Array, Array]:
        """Return before which moment each of some storages is still on the device, and when it begins to come back."""
        some, queued, ahead = sorted(which), 0.0, 0.0
        gone, back = dict.fromkeys(some, 0), dict.fromkeys(some, 2**62)
        queue, left, came = dict[int, float](), list[int](), set[int]()
        moments = [(int(self.saved_at[i]), True, i) for i in some] + [(int(self.back[i]), False, i) for i in some]
        for moment, saves, i in sorted(moments):
            size = float(self.n_bytes[i])
            if saves:
                queue[i] = size
                queued += size
                left.append(i)
                while queued > window:
                    first = next(iter(queue))
                    gone[first] = moment + 1
                    queued -= queue.pop(first)
                continue
            if i in queue:
                # it has never been away
                queued -= queue.pop(i)
                gone[i] = moment
            elif i in came:
                ahead -= size
            came.add(i)
            for other in reversed(left[: left.index(i)]):
                if other in came or other in queue:
                    continue
                if ahead + self.n_bytes[other] > window:
                    break
                ahead += float(self.n_bytes[other])
                back[other] = moment
                came.add(other)
        return np.array([gone[i] for i in which], int), np.array([back[i] for i in which], int)

    @property
    def _saved(self) -> Array:
        found: Array = self.clock[self.saved_at + 1]
        return found

    @property
    def _needed(self) -> Array:
        found: Array = self.clock[self.back]
        return found

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return float(self.clock[-1])

    def timeline(
        self, groups: Sequence[Sequence[int]], freed_again: Array | None = None, again: Array | None = None
    ) -> Timeline:
        """Return the timeline of groups of storages, whose operators run again in so many seconds."""
        host = np.stack([self.away(group) for group in groups])
        # neighbours of a group are copied together where they are many
        share = np.cumsum(self.n_bytes) * COPIES // max(self.n_bytes.sum(), 1)
        copies = [
            (i, [one for one in group if share[one] == at])
            for i, group in enumerate(groups)
            for at in np.unique(share[list(group)])
        ]
        return Timeline(
            live=self._spans[0],
            freed=np.stack([0 * host, host, np.zeros_like(host) if freed_again is None else freed_again]),
            part=np.array([i for i, _ in copies], int),
            n_bytes=np.array([self.n_bytes[some].sum() for _, some in copies]),
            saved=np.array([self._saved[some].max() for _, some in copies]),
            needed=np.array([self._needed[some].min() for _, some in copies]),
            again=np.full(len(groups), np.inf) if again is None else again,
            seconds=self.seconds,
        )

    def took(self, which: Collection[int], link: Link) -> float:
        """Return the seconds of the step if these storages leave."""
        n = len(self.number)
        line = Timeline(
            live=self.live[:1],
            freed=np.zeros((3, n, 1)),
            part=np.arange(n),
            n_bytes=self.n_bytes,
            saved=self._saved,
            needed=self._needed,
            again=np.full(n, np.inf),
            seconds=self.seconds,
        )
        return line.took([HOST if i in which else KEEP for i in range(n)], link)
