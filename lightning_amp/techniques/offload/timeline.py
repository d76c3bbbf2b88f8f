"""Define a training step as a line of moments on which tensors are saved and asked for, and what it takes with them on
the host.

Each part of what autograd keeps (a tensor, or several that are treated alike) has one of three ways:

    KEEP     it stays on the device
    HOST     it leaves when it is saved, and comes back when the backward pass asks for it
    AGAIN    it is freed, and its operators run again when the backward pass asks for it

Copies of a direction run one after the other, beside the computation. As in `Moves`, at most W bytes wait for their
copy to the host, and at most W bytes come back before anything asks for them; the device waits where more would. Which
copies are under way thus follows from the order of moments alone (`_copies`), whatever the seconds between them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_amp.footprint.module_profile import bytes_alive
from lightning_amp.techniques.host_memory.limit import page_locked

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
        window: W, bytes; 0 if copies do not run beside the computation.
    """

    out: float
    back: float
    window: float


Moments = Iterable[tuple[float, str, int]]
"""When something is "saved", "needed", or made "again", and its number."""


def _copies(moments: Moments, sizes: Sequence[float], window: float) -> Iterator[tuple[float, str, int]]:
    """Yield when a copy begins ("out", "back") and has to have ended ("gone", "there"); and "again", as it is."""
    # what waits for its copy, what left, at which place in this order, and what came back
    queue, left, place, came = dict[int, None](), list[int](), dict[int, int](), set[int]()
    queued = ahead = 0.0
    for at, what, i in moments:
        if what == "again":
            yield at, what, i
        elif what == "saved":
            yield at, "out", i
            queue[i], place[i] = None, len(place)
            left.append(i)
            queued += sizes[i]
            while queued > window:
                first = next(iter(queue))
                del queue[first]
                queued -= sizes[first]
                yield at, "gone", first
        else:
            # until its copy has ended
            stays = i in queue
            if stays:
                del queue[i]
                queued -= sizes[i]
            elif i in came:
                ahead -= sizes[i]
            else:
                yield at, "back", i
            yield at, "gone" if stays else "there", i
            came.add(i)
            for other in reversed(left):
                if place[other] >= place.get(i, len(place)) or other in came or other in queue:
                    continue
                if ahead + sizes[other] > window:
                    break
                ahead += sizes[other]
                came.add(other)
                yield at, "back", other
            while left and left[-1] in came:
                left.pop()


def _seconds(moments: Moments, sizes: Sequence[float], link: Link, again: Sequence[float] = ()) -> float:
    """Return the seconds that a step waits for copies, and for operators that run again."""
    waited = out_ends = back_ends = 0.0
    if not link.window:
        # one after the other, to the last bit: parts that take equally long are chosen in their order
        for _, what, i in moments:
            waited += again[i] if what == "again" else sizes[i] / (link.out if what == "saved" else link.back)
        return waited
    ends = dict[int, float]()
    for clock, what, i in _copies(moments, sizes, link.window):
        if what == "again":
            waited += again[i]
        elif what == "out":
            ends[i] = out_ends = max(out_ends, clock + waited) + sizes[i] / link.out
        elif what == "back":
            ends[i] = back_ends = max(back_ends, clock + waited) + sizes[i] / link.back
        else:
            waited = max(waited, ends[i] - clock)
    return waited


def _moments(saved: Array, needed: Array, which: Iterable[int]) -> list[tuple[float, str, int]]:
    # needed before saved at the same time, as of tensors that a backward pass inside the step reads
    both = ("needed", needed.tolist()), ("saved", saved.tolist())
    return sorted((at[i], what, i) for what, at in both for i in which)


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """A step, and the parts of what autograd keeps in it.

    Attributes:
        live: [moment] bytes on the device if all parts are kept.
        freed: [way, part, moment] bytes that a way of a part frees.
        part: [copy] the part that a copy to the host, and back, belongs to.
        n_bytes: [copy] its bytes.
        taken: [copy] bytes of host memory that it takes.
        saved, needed: [copy] when it may begin, and has to be back: seconds from the begin of a step in which all parts
            are kept.
        again: [part] seconds of its operators; inf if they cannot run again.
        seconds: Seconds of that step.
    """

    live: Array
    freed: Array
    part: Array
    n_bytes: Array
    taken: Array
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
    def _moments(self) -> list[tuple[float, str, int]]:
        return _moments(self.saved, self.needed, range(len(self.part)))

    def host_bytes(self, ways: Sequence[int]) -> float:
        """Return the bytes of host memory for what leaves."""
        found: float = self.taken[np.asarray(ways, int)[self.part] == HOST].sum()
        return found

    def took(self, ways: Sequence[int], link: Link) -> float:
        """Return the seconds of the step; inf if a part that cannot run again should."""
        part, ran, moments = self.part.tolist(), set[int](), list[tuple[float, str, int]]()
        for at, what, i in self._moments:
            own, way = part[i], ways[part[i]]
            if way == HOST:
                moments.append((at, what, i))
            elif way == AGAIN and what == "needed" and own not in ran:
                ran.add(own)
                moments.append((at, "again", own))
        return self.seconds + _seconds(moments, self.n_bytes.tolist(), link, self.again.tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class OnHost:
    """What a step with storages on the host takes there.

    Attributes:
        host_bytes: Bytes of the pool.
        left_bytes: Bytes that leave.
        n_left: Number of storages that leave.
    """

    host_bytes: int
    left_bytes: int
    n_left: int


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedTensors:
    """Storages that a counted step could have on the host, and its bytes while all are on the device.

    Attributes:
        live: [moment] bytes on the device; a moment is one operator.
        clock: [moment + 1] seconds before each moment, and of the step.
        sizes: Bytes of all storages that may leave, by number.
        buffers: [event] number of a storage whose host memory is taken (1) or given back (0), which, and whether that
            is in this step, not before.
        number: [storage] of those whose leaving frees something: the number,
        n_bytes: the size,
        place: the place among the operators that a replay counts,
        saved_at: the moment at which autograd saves it,
        gone, back: and where it would be away: at the moments gone <= t < back.
        shapes: Shapes of the step's arguments.
        pinned: Whether host memory is page-locked, as for a GPU.
    """

    live: Array
    clock: Array
    sizes: Array
    buffers: Array
    number: Array
    n_bytes: Array
    place: Array
    saved_at: Array
    gone: Array
    back: Array
    shapes: tuple[tuple[int, ...], ...] = ()
    pinned: bool = False

    @cached_property
    def taken(self) -> Array:
        """[storage] bytes of host memory that it takes."""
        if not self.pinned:
            return self.n_bytes
        return np.array([page_locked(int(n)) for n in self.n_bytes], float)

    def at_least(self, n_bytes: int) -> "SavedTensors":
        """Return those of at least so many bytes, numbered without the others."""
        large = self.sizes >= n_bytes
        some, numbers = large[self.number], np.cumsum(large) - 1
        names = ("number", "n_bytes", "place", "saved_at", "gone", "back")
        kept = {name: getattr(self, name)[some] for name in names}
        kept["number"] = numbers[kept["number"]]
        kept["buffers"] = self.buffers[large[self.buffers[:, 0]]]
        kept["buffers"][:, 0] = numbers[kept["buffers"][:, 0]]
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
        some = np.asarray(which, int)
        moments = np.maximum(self.gone[some], gone), np.minimum(self.back[some], back)
        begins, ends = np.searchsorted(first, moments)
        return bytes_alive(begins, ends - 1, self.n_bytes[some], len(first))

    def peak(self, which: Sequence[int], window: float = 0) -> float:
        """Return the most bytes on the device if these storages leave, at most W bytes at once in each direction."""
        late = self._in_flight(which, window) if window else (0, 2**62)
        return float((self._spans[0] - self.away(which, *late)).max())

    def _in_flight(self, which: Sequence[int], window: float) -> tuple[Array, Array]:
        """Return before which moment each of some storages is still on the device, and when it begins to come back."""
        gone, back = np.zeros(len(self.number), int), np.full(len(self.number), 2**62)
        moments = _moments(self.saved_at, self.back, which)
        for moment, what, i in _copies(moments, self.n_bytes.tolist(), window):
            if what == "gone":
                gone[i] = moment + 1
            elif what == "back":
                back[i] = moment
        return gone[which], back[which]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return float(self.clock[-1])

    def timeline(
        self, groups: Sequence[Sequence[int]], freed_again: Array | None = None, again: Array | None = None
    ) -> Timeline:
        """Return the timeline of groups of storages, whose operators run again in so many seconds."""
        host = np.stack([self.away(group) for group in groups])
        saved, needed = self.clock[self.saved_at + 1], self.clock[self.back]
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
            taken=np.array([self.taken[some].sum() for _, some in copies]),
            saved=np.array([saved[some].max() for _, some in copies]),
            needed=np.array([needed[some].min() for _, some in copies]),
            again=np.full(len(groups), np.inf) if again is None else again,
            seconds=self.seconds,
        )

    def took(self, which: Collection[int], link: Link) -> float:
        """Return the seconds of the step if these storages leave."""
        moments = _moments(self.clock[self.saved_at + 1], self.clock[self.back], which)
        return self.seconds + _seconds(moments, self.n_bytes.tolist(), link)
