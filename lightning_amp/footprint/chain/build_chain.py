"""Build a Chain from a recorded step: the live bytes of each block over time, kept and recomputed.

A storage is alive from its creation for as long as Python or an operator outside of blocks holds it, and after that
while a block holds it. Each storage is one of three:

    private    made by a block, and held after its forward pass by that block alone, for its backward pass
    shared     held by blocks in any other way: an entry of `Chain.tensors`
    plain      all others; they are alive in every choice of forms

    form         forward pass of the block                backward pass of the block
    kept         private storages stay                    each is released after its last read
    recomputed   private storages are released when       at the first read of one of them, the forward pass runs again
                 Python releases them                     up to the last; then as above, with the inputs alive

If other code still holds a tensor that the recomputation makes again, both copies are counted.

Known limit: if backward passes do not run in the reverse order of forward passes, the bytes are overestimated.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_amp.footprint.chain.chain import KEPT, RECOMPUTED, BlockCost, Chain, ChainMoment
from lightning_amp.footprint.module_profile import BACKWARD


@dataclass(kw_only=True, slots=True)
class _Span:
    """Operators of a call of a block, and the bytes of its private storages.

    Attributes:
        start: First operator of its forward pass; `end`, `back_start` and `back_end` likewise.
        asks: Operator of its backward pass before which it is recomputed.
        last_kept: Operator of its forward pass after which autograd saves nothing more.
        kept: Bytes of private storages at each operator of the forward pass, not recomputed. While storages are placed,
            this array and the next four contain changes, which are summed afterwards.
        dropped: The same, recomputed.
        again: Bytes of all storages that the forward pass makes when it is recomputed.
        back: Bytes of private storages at each operator of the backward pass.
        twice: Bytes of storages that exist twice after a recomputation.
        saved_bytes: Bytes of private storages between the passes.
        keeps: Shared storages that it keeps, and the last operator at which it does.
        inputs: Shared storages that it holds when recomputed.
    """

    start: int
    end: int
    back_start: int
    back_end: int
    asks: int
    last_kept: int
    kept: Any
    dropped: Any
    again: Any
    back: Any
    twice: Any
    saved_bytes: int = 0
    keeps: dict[int, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)


class ChainBuilder:
    """Builder of the chain of one step.

    Args:
        step: A chain_recorder.ChainRecorder after the step.
        values: Whether the step had values, so that autograd kept its saved tensors.
    """

    def __init__(self, step: Any, *, values: bool) -> None:
        self._step, self._values = step, values
        self._length = len(step.work)
        self._is_backward = np.array([phase == BACKWARD for phase, _ in step.work])
        self._orders = np.asarray(step.orders)
        self._plain = np.zeros(self._length + 1, dtype=np.int64)
        self._born = np.zeros(self._length + 1, dtype=np.int64)
        self._tensors: list[int] = []
        self._covers: list[tuple[int, int, int]] = []
        self._uses: dict[int, list[Any]] = defaultdict(list)
        for use in step.uses:
            self._uses[id(use.life)].append(use)
        self._spans = [self._span(call) for call in step.calls]
        self._read_by: dict[int, list[int]] = defaultdict(list)
        self._made_by: dict[int, int] = {}
        for i, call in enumerate(step.calls):
            for life in call.inputs:
                self._read_by[id(life)].append(i)
            for life in call.outputs:
                self._made_by[id(life)] = i

    def chain(self) -> Chain:
        """Return the chain with all blocks and moments."""
        starts = np.array([span.start for span in self._spans])
        for life in self._step.lives:
            # calls are disjoint and sorted, so only the last call that has started by the birth can be the maker
            home = int(np.searchsorted(starts, life.birth, side="right")) - 1
            if home >= 0 and life.birth > self._spans[home].end:
                home = -1
            self._place(life, home)
        self._plain = self._plain.cumsum()[: self._length]
        for span in self._spans:
            for name in ("kept", "dropped", "again", "back", "twice"):
                setattr(span, name, getattr(span, name).cumsum())
        blocks = tuple(
            BlockCost(
                fqn=call.fqn,
                forward_seconds=call.seconds,
                saved_bytes=span.saved_bytes,
                keeps=tuple(sorted(span.keeps)),
                inputs=tuple(sorted(span.inputs)),
                fixed=call.fixed or ("" if span.back_end >= span.back_start else "it has no backward pass"),
            )
            for call, span in zip(self._step.calls, self._spans, strict=True)
        )
        moments, seconds = tuple(self._moments()), sum(self._step.took)
        return Chain(
            blocks=blocks,
            tensors=tuple(self._tensors),
            moments=moments,
            seconds=seconds,
            launch_seconds=self._step.launch_seconds,
        )

    def _span(self, call: Any) -> _Span:
        own = self._is_backward & (self._orders >= call.first_order) & (self._orders < call.last_order)
        # gradients that are computed within the forward pass belong to it
        times = np.flatnonzero(own[call.end + 1 :]) + call.end + 1
        back_start, back_end = (int(times[0]), int(times[-1])) if len(times) else (call.end + 1, call.end)
        # gradient accumulation has no position in the forward pass, and follows the block's own operators
        adds = self._is_backward & (self._orders == -1)
        while 0 <= back_end < self._length - 1 and len(times) and adds[back_end + 1]:
            back_end += 1
        asks = back_start if call.asks is None else call.asks
        # one extra entry: a storage that lives to the last operator is subtracted one past it
        kept, dropped, again = np.zeros((3, call.end - call.start + 2), dtype=np.int64)
        back, twice = np.zeros((2, max(back_end - back_start + 2, 1)), dtype=np.int64)
        return _Span(
            start=call.start,
            end=call.end,
            back_start=back_start,
            back_end=back_end,
            # a node may read without running an operator; the next operator may then belong to another block
            asks=min(max(asks, back_start), max(back_start, back_end)),
            last_kept=call.last_kept,
            kept=kept,
            dropped=dropped,
            again=again,
            back=back,
            twice=twice,
        )

    def _place(self, life: Any, home: int) -> None:
        """Count one storage as private, shared or plain; `home` is the call that made it, -1 for none."""
        python_end, outside_end, keepers = self._holders(life)
        span = self._spans[home] if home >= 0 else None
        if span is not None:
            # in a recomputation, it lives while Python holds it, or to the end if the backward pass needs it
            end = span.last_kept if home in keepers else min(python_end, span.last_kept)
            if end >= life.birth:
                _add(span.again, life.birth - span.start, end - span.start, life.n_bytes)
        # a recomputed block holds its inputs until its backward pass ends; this is free if other code holds them too
        readers = {i for i in self._read_by.get(id(life), ()) if self._spans[i].back_end > outside_end}
        named = id(life) in self._made_by or id(life) in self._read_by
        held = span is not None and max(span.end + 1, span.back_start - 1) <= python_end <= span.back_end
        if span is not None and held and not named and outside_end == python_end:
            # the backward pass holds it other than through autograd; a storage that is released before that pass, such
            # as autocast's copies of weights, exists in any case
            keepers[home] = max(python_end, keepers.get(home, 0))
            python_end = outside_end = span.end
        # if other code holds a tensor as long as the block does, recomputing the block does not release it
        beyond = {i: end for i, end in keepers.items() if end > max(outside_end, self._spans[i].end)}
        if span is not None and not readers and set(beyond) <= {home} and outside_end <= span.end:
            self._private(life, span, python_end, max(python_end, keepers.get(home, python_end)))
            return
        # shared
        if beyond or readers:
            k = len(self._tensors)
            self._tensors.append(life.n_bytes)
            self._covers.append((k, life.birth, outside_end))
            # what is never read stays after the backward pass, recomputed or not
            stays = [self._spans[i].back_end for i, end in beyond.items() if end > self._spans[i].back_end]
            if stays and max(beyond.values()) > outside_end:
                self._covers.append((k, max(min(stays), outside_end) + 1, max(beyond.values())))
            for i, end in beyond.items():
                self._spans[i].keeps[k] = end
            for i in readers:
                self._spans[i].inputs.add(k)
        else:
            until = max([outside_end, *keepers.values()])
            _add(self._plain, life.birth, min(until, self._length - 1), life.n_bytes)
            self._born[life.birth] += life.n_bytes
        if span is not None and home in keepers:
            # a second copy exists from the recomputation on
            begin, end = span.asks, min(keepers[home], span.back_end)
            if begin <= end and span.back_start <= begin:
                _add(span.twice, begin - span.back_start, end - span.back_start, life.n_bytes)

    def _holders(self, life: Any) -> tuple[int, int, dict[int, int]]:
        """Return the last operators at which a storage is held: by Python, by all code outside blocks, by each call."""
        uses, last = self._uses.get(id(life), []), self._length - 1
        keepers: dict[int, int] = defaultdict(int)
        python_end = last if life.death is None else int(life.death)
        if self._values and uses:
            read = max(life.birth, self._step.read_last.get(id(life), 0))
            made = self._made_by.get(id(life))
            # a result lives until its block returns, although no operator of the block may read it
            python_end = min(python_end, read if made is None else max(read, self._spans[made].end))
        outside_end = python_end
        for use in uses:
            end = last if use.end is None else use.end
            if use.call is None:
                outside_end = max(outside_end, end)
            elif end > self._spans[use.call].end:
                keepers[use.call] = max(keepers[use.call], end)
            else:
                # saved in a graph whose backward ran within the forward pass
                python_end, outside_end = max(python_end, end), max(outside_end, end)
        return python_end, outside_end, keepers

    def _private(self, life: Any, span: _Span, python_end: int, kept_until: int) -> None:
        for found, end in ((span.kept, kept_until), (span.dropped, python_end)):
            _add(found, life.birth - span.start, min(end, span.end) - span.start, life.n_bytes)
        if kept_until > span.end:
            span.saved_bytes += life.n_bytes
            if span.back_end >= span.back_start:
                # between the passes `saved_bytes` counts it at every moment, so it ends in the backward pass at the
                # earliest
                end = min(max(kept_until, span.back_start), span.back_end)
                _add(span.back, 0, end - span.back_start, life.n_bytes)
                # of a loss that is never differentiated, it stays, recomputed or not
                if kept_until > span.back_end:
                    _add(self._plain, span.back_end + 1, min(kept_until, self._length - 1), life.n_bytes)

    def _moments(self) -> list[ChainMoment]:
        """Return all moments that are not dominated by another one."""
        found: dict[Any, dict[frozenset[int], tuple[int, int]]] = defaultdict(dict)
        alive, (after, first) = self._alive(), self._places()
        # moments of the same block, form and range of blocks differ only in their own bytes and tensors; one dominates
        # all others that have no more bytes and no other tensors
        inside = np.zeros(self._length, dtype=bool)
        for i, span in enumerate(self._spans):
            inside[span.start : span.end + 1] = inside[span.back_start : span.back_end + 1] = True
            for t, recomputed, held, n_bytes in self._at_work(span, alive):
                # a moment covers only earlier blocks; if passes cross, bytes of later blocks are added as a constant,
                # as if all were kept
                later = [other for other in self._spans[i + 1 : after[t]] if other.end < t < other.back_start]
                above = sum(other.saved_bytes + sum(self._tensors[k] for k in other.keeps) for other in later)
                _raise(found[first[i], i, i, recomputed], held, t, n_bytes + above)
        for t in map(int, np.flatnonzero(~inside)):
            hull = int(after[t])
            _raise(found[first[hull - 1] if hull else 0, hull, None, False], alive[t], t, self._plain[t])
        return [
            ChainMoment(
                n_bytes=n_bytes,
                first=place[0],
                after=place[1],
                alive=tuple(sorted(held)),
                block=place[2],
                form=RECOMPUTED if place[3] else KEPT,
                where=" ".join(filter(None, self._step.work[t])),
            )
            for place, rows in found.items()
            for held, (n_bytes, t) in _highest(rows)
        ]

    def _at_work(self, span: _Span, alive: Sequence[frozenset[int]]) -> Iterator[tuple[int, bool, Any, int]]:
        """Yield moments of a block's own passes in both forms: (operator, recomputed, shared tensors alive, bytes)."""
        for t in range(span.start, span.end + 1):
            for again, own in ((False, span.kept), (True, span.dropped)):
                yield t, again, alive[t], int(self._plain[t] + own[t - span.start])
        if span.back_end < span.back_start:
            return
        t = span.asks
        # peak of the second forward pass, while everything that the backward pass needs is kept; a block that saves
        # nothing has last_kept = start - 1, and a maximum needs one entry
        work = int(span.again[: max(span.last_kept - span.start + 1, 1)].max())
        # the second forward pass runs before operator t, whose own results (`_born`) do not exist yet
        yield t, True, alive[t] | span.inputs, int(self._plain[t] - self._born[t]) + work
        for t in range(span.back_start, span.back_end + 1):
            plain, own = int(self._plain[t]), int(span.back[t - span.back_start])
            yield t, False, alive[t] | {k for k, end in span.keeps.items() if end >= t}, plain + own
            own += int(span.twice[t - span.back_start])
            # before its first read of a saved tensor, its forward pass has not been recomputed
            yield t, True, alive[t] | span.inputs, plain + (own if t >= span.asks else 0)

    def _alive(self) -> list[frozenset[int]]:
        """Return the shared tensors that are alive in every choice of forms, at every operator."""
        changes: dict[int, list[int]] = defaultdict(list)
        for k, birth, end in self._covers:
            changes[birth].append(k)
            changes[end + 1].append(k)
        found, now = [], frozenset[int]()
        for t in range(self._length):
            now = now.symmetric_difference(changes[t]) if t in changes else now
            found.append(now)
        return found

    def _places(self) -> tuple[Any, list[int]]:
        """Return, per operator, one past the last block between its passes; per block, the first block to sum from.

        If a backward pass has ended before a forward pass begins, the blocks before it hold nothing any more.
        """
        n = len(self._spans)
        after, low = np.zeros(self._length, dtype=np.int64), np.full(self._length, n)
        # the last write wins: this order leaves the highest block in `after`, the reverse order the lowest in `low`
        for i, span in enumerate(self._spans):
            after[span.end + 1 : span.back_start] = i + 1
        for i, span in reversed(list(enumerate(self._spans))):
            low[span.end + 1 : span.back_start] = i
        high = after.copy()
        for i, span in enumerate(self._spans):
            for part in (slice(span.start, span.end + 1), slice(span.back_start, span.back_end + 1)):
                low[part], high[part] = np.minimum(low[part], i), np.maximum(high[part], i + 1)
        # blocks can be separated where no moment has blocks on both sides between their passes
        crossed = np.zeros(n + 2, dtype=bool)
        for begin, end in {(int(a), int(b)) for a, b in zip(low, high, strict=True)}:
            crossed[begin + 1 : end] = True
        cuts = [p for p in range(n + 1) if not crossed[p]]
        return after, [max(p for p in cuts if p <= i) for i in range(n)]


def _add(changes: Any, first: int, last: int, n_bytes: int) -> None:
    """Add bytes that are alive at the operators [first, last] to differences that are summed later."""
    changes[first] += n_bytes
    changes[last + 1] -= n_bytes


def _raise(rows: dict[frozenset[int], tuple[int, int]], held: frozenset[int], t: int, n_bytes: Any) -> None:
    """Update the most bytes for a set of tensors."""
    if held not in rows or int(n_bytes) > rows[held][0]:
        rows[held] = int(n_bytes), t


def _highest(rows: dict[frozenset[int], tuple[int, int]]) -> Iterator[tuple[frozenset[int], tuple[int, int]]]:
    """Yield the rows that are not dominated by a row with at least the same tensors and bytes."""
    kept: list[frozenset[int]] = []
    # in descending order of bytes, only earlier rows can dominate a row
    for held, row in sorted(rows.items(), key=lambda item: -item[1][0]):
        if not any(held <= other for other in kept):
            kept.append(held)
            yield held, row
