"""Split a recorded step at the blocks of one list into segments, from which pipeline stages are predicted.

A step of K blocks has K + 1 segments. Segment i < K ends with block i, so that operators between two blocks belong to
the later one, as when a stage runs it (block_walk.py). The last segment is everything after the blocks. Backward
operators belong to a segment by autograd's numbers; gradient accumulation belongs to the segment of the node before it.

    made by blocks, or dependent on their results    made by the rank that has the segment
    dependent on the batch alone (mask, positions)   made by every rank that has a later segment
    dependent on parameters, but on no block (an embedding of time, which every block reads)    made by every rank whose
                 segments read it; each has its graph too, and sums its gradients with the other ranks

Known limits: as of build_chain.py; reads between the creation of a storage and its last read are ignored; the time of
operators that several ranks run counts once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_amp.footprint.chain.impossible_stages import (
    calls_of,
    drawn_before,
    homes_of,
    impossible,
    readers_of,
    skips,
)
from lightning_amp.footprint.module_profile import BACKWARD, BATCH, GRADIENTS, OPTIMISER, PARAMETERS, STATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter: its bytes, those of its gradient and optimizer state, and the segments that read it.

    Attributes:
        segments: Segments that read it, or read a tensor that earlier segments made from it without a block.
        block: Segment of the block that contains it; None outside the blocks, or if other segments read it too.
    """

    name: str
    n_bytes: int
    gradient_bytes: int
    state_bytes: int
    segments: tuple[int, ...]
    block: int | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passes:
    """One training step of a batch or a micro-batch.

    Attributes:
        rows: Number of samples.
        names: Names of the K blocks.
        first: First forward operator of each segment, and one past the last forward operator, [K + 2].
        called: First operator of the forward pass of each block, [K].
        last_kept: Last operator of it after which autograd saves a tensor, [K].
        asks: Operator of the backward pass of each block before which a tensor of these is first read, [K]; 0 if none.
        segment: Segment of each operator of the backward pass, -1 for others, [operator].
        optimises: Whether an operator belongs to the optimizer step, [operator].
        seconds: Time of each operator, [operator].
        birth, held: First operator of each storage, and the last at which Python holds it, [storage]. Parameters,
            gradients, optimizer state and the batch are not included, except for `copies`.
        n_bytes: Bytes of each storage, [storage].
        computed: Whether it depends on parameters, [storage].
        of_blocks: Whether a block made it, or it depends on a block's result, [storage].
        needs: For each segment, the operators of earlier segments outside of blocks that it depends on, [K + 1].
        maker: For each operator of the backward pass, the forward operator that made its node; -1 for others.
        inputs, outputs: Storages that each block receives and returns.
        sent_bytes: Bytes of the tensors that each block returns, [K].
        strided_bytes: Bytes of those of them that are not contiguous, and are copied to be sent, [K].
        copies: Storages of the batch of which every call of the step gets a copy, if it is called several times.
        writes_batch: Whether the step writes into the batch.
        returned: Storages that the last segment makes and the step returns.
        uses: Storages that autograd keeps: storage, segment that keeps it, last operator at which it is kept, operator
            that made the node that reads it, first operator of that node (-1 if none does), [use, 5].
        gradients: Gradients: operator, bytes, segment whose backward pass makes it, and the last operator at which its
            node has not returned it, [gradient, 4]. A node returns all of its gradients together: a node that runs in
            chunks holds those of its inputs and parameters from its first chunk to its last.
        sums: Parts that autograd adds up to the gradient of a parameter that several segments read: row of `gradients`,
            storage, last operator at which its node has not returned it (-1 for a sum of two others), [part, 3].
        parameters: All parameters.
        buffer_bytes, batch_bytes: Bytes of buffers, and of the batch.
        frees_gradients: Whether the last step's gradients are freed before this step.
        away: Bytes from which a storage that autograd keeps leaves for the host; None if all stay.
        draws: Why the batch cannot be cut into micro-batches; "" if no reason was detected.
        draws_first: Operator that makes what is drawn first before the blocks, -1 if nothing is; 0 if numbers of Python
            or NumPy are drawn, which every rank draws.
    """

    rows: int
    names: tuple[str, ...]
    first: Any
    called: Any
    last_kept: Any
    asks: Any
    segment: Any
    optimises: Any
    seconds: Any
    birth: Any
    held: Any
    n_bytes: Any
    computed: Any
    of_blocks: Any
    needs: tuple[Any, ...]
    maker: Any
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    sent_bytes: tuple[int, ...]
    strided_bytes: tuple[int, ...]
    copies: tuple[int, ...]
    writes_batch: bool
    returned: tuple[int, ...]
    uses: Any
    gradients: Any
    sums: Any
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    batch_bytes: int
    frees_gradients: bool = False
    away: int | None = None
    draws: str = ""
    draws_first: int = -1

    def at(self, other: "Passes", rows: int) -> "Passes | None":
        """Interpolate passes for a batch of `rows` samples from two; None if these have equal rows or unlike forms."""
        if self.rows == other.rows or not (
            np.array_equal(self.birth, other.birth)
            and np.array_equal(self.uses[:, :2], other.uses[:, :2])
            and len(self.seconds) == len(other.seconds)
        ):
            return None
        share = (rows - self.rows) / (other.rows - self.rows)

        def between(one: Any, two: Any) -> Any:
            return np.maximum(one + share * (np.asarray(two, dtype=float) - one), 0)

        def of_blocks(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(int(n) for n in between(np.asarray(one), two).round())

        return replace(
            self,
            rows=rows,
            n_bytes=between(self.n_bytes, other.n_bytes).round().astype(np.int64),
            seconds=between(self.seconds, other.seconds),
            sent_bytes=of_blocks(self.sent_bytes, other.sent_bytes),
            strided_bytes=of_blocks(self.strided_bytes, other.strided_bytes),
        )

    def may_leave(self) -> Any:
        """Mask of the storages that leave for the host if autograd keeps them; arguments of the step stay."""
        least = np.inf if self.away is None else max(self.away, 1)
        return (self.n_bytes >= least) & ~np.isin(np.arange(len(self.n_bytes)), self.copies)

    def called_once(self) -> "Passes":
        """Return the passes of a step that gets the batch itself."""
        n_bytes = self.n_bytes.copy()
        n_bytes[list(self.copies)] = 0
        return replace(self, n_bytes=n_bytes, writes_batch=False)


def passes_of(step: Any, names: Sequence[str], *, rows: int, values: bool) -> "Passes | str":
    """Return the passes of a step through blocks, or why the blocks cannot be pipeline stages.

    Args:
        step: A chain_recorder.ChainRecorder after the step.
        names: Names of the blocks, in the order of their list.
        rows: Samples in the batch.
        values: As in ChainBuilder.
    """
    if reason := impossible(step, names):
        return reason
    calls = calls_of(step, names)
    if len(calls) != len(names):
        return f"of the {len(names)!r} blocks {names[0]!r} to {names[-1]!r}, {len(calls)!r} were called with gradients"
    # a plan that was asked for may have no cut where it matters
    if reason := skips(step, calls):
        return reason
    drawn = (life.birth for life in step.lives if id(life) in step.drawn and life.birth < calls[0].start)
    draws_first = 0 if step.decides else min(drawn, default=-1)
    found = _Cut(step, calls, rows, values).passes()
    return replace(found, draws=drawn_before(step, calls), draws_first=draws_first)


class _Cut:
    """Computation of the passes of one step."""

    def __init__(self, step: Any, calls: Sequence[Any], rows: int, values: bool) -> None:
        self._step, self._calls, self._rows, self._values = step, calls, rows, values
        self._phases = [phase for phase, _ in step.work]
        back = next((t for t, phase in enumerate(self._phases) if phase == BACKWARD), len(step.work))
        self._first = np.array([0, *(call.end + 1 for call in calls), back])
        kept = [life for life in step.lives if life.kind not in (PARAMETERS, GRADIENTS, STATE)]
        self._lives = [life for life in kept if life.name != BATCH or id(life) in step.integers]
        self._place = {id(life): i for i, life in enumerate(self._lives)}
        # autograd's number when each forward operator ran; its own node has a smaller number
        self._numbers = np.maximum.accumulate(np.array(step.orders[:back]))
        self._needs = tuple(self._needed())
        # last operator of each node, and the last use of each storage saved in graphs that a backward pass creates
        self._last_of = {step.orders[t]: t for t in range(back, len(self._phases)) if step.orders[t] >= 0}
        self._last, self._kept_again = len(self._phases) - 1, dict[int, int]()
        for use in step.uses:
            if self._phases[use.start] == BACKWARD:
                end = self._last if use.end is None else use.end
                self._kept_again[id(use.life)] = max(end, self._kept_again.get(id(use.life), 0))

    def passes(self) -> Passes:
        """Return the passes."""
        step, lives = self._step, self._lives
        # a call has the numbers below its `last_order`, where the next segment starts
        ends = np.array([call.last_order for call in self._calls])
        segment = self._by_node(lambda order: int(np.searchsorted(ends, order, side="right")), len(self._calls))
        kinds = {
            kind: {life.name: life for life in step.lives if life.kind == kind} for kind in (PARAMETERS, GRADIENTS)
        }
        # a gradient born at 0 exists before the step, and is only added to
        gradients = [life for life in kinds[GRADIENTS].values() if life.birth and segment[life.birth] >= 0]
        parameters = tuple(self._parameters(kinds))
        # of others, a gradient that is the sum of two may be the gradient of activations, or a view of it
        several = {f"{p.name}.grad" for p in parameters if len(p.segments) > 1}
        return Passes(
            rows=self._rows,
            names=tuple(call.fqn for call in self._calls),
            first=self._first,
            called=_whole(call.start for call in self._calls),
            last_kept=_whole(call.last_kept for call in self._calls),
            asks=_whole(call.asks or 0 for call in self._calls),
            segment=segment,
            optimises=np.array([phase == OPTIMISER for phase in self._phases]),
            seconds=np.array(step.took),
            birth=_whole(life.birth for life in lives),
            held=_whole(self._held(life) for life in lives),
            # a copy has the bytes of a tensor, which may be a part of its storage
            n_bytes=_whole(step.integers.get(id(life), life.n_bytes) for life in lives),
            computed=np.array([id(life) in step.computed for life in lives], dtype=bool),
            of_blocks=np.array([id(life) in step.of_blocks for life in lives], dtype=bool),
            needs=self._needs,
            maker=self._by_node(self._maker, -1),
            inputs=tuple(self._places(call.inputs) for call in self._calls),
            outputs=tuple(self._places(call.outputs) for call in self._calls),
            sent_bytes=tuple(call.output_bytes for call in self._calls),
            strided_bytes=tuple(call.strided_bytes for call in self._calls),
            copies=tuple(self._place[life] for life in step.integers if life in self._place),
            writes_batch=BATCH in step.written,
            returned=self._places([life for life in step.returned if life.birth >= self._first[-2]]),
            uses=np.array(list(self._uses()), dtype=np.int64).reshape(-1, 5),
            gradients=np.array(
                [(t := life.birth, life.n_bytes, segment[t], self._returned(t)) for life in gradients], dtype=np.int64
            ).reshape(-1, 4),
            sums=np.array(
                [(n, *part) for n, life in enumerate(gradients) if life.name in several for part in self._added(life)],
                dtype=np.int64,
            ).reshape(-1, 3),
            parameters=parameters,
            buffer_bytes=sum(life.n_bytes for name, life in kinds[PARAMETERS].items() if name not in step.trained),
            batch_bytes=sum(life.n_bytes for life in step.lives if life.name == BATCH),
            frees_gradients=step.frees_gradients,
        )

    def _returned(self, t: int) -> int:
        """Return the last operator at which a node has not returned what operator `t` has made."""
        # returned with the last operator of its node, and at least one operator later
        return max(t + 1, self._last_of.get(self._step.orders[t], 0))

    def _added(self, total: Any) -> Iterator[tuple[int, int]]:
        """Yield what autograd has added up to a storage, and until when a node has it."""
        back = int(self._first[-1])
        if self._step.operators[total.birth] != "add":
            return
        ended = (life for life in self._lives if life.death == total.birth and back <= life.birth < total.birth)
        parts = [life for life in ended if life.n_bytes == total.n_bytes]
        if len(parts) == 2:
            for part in parts:
                below = [*self._added(part)]
                yield self._place[id(part)], -1 if below else self._returned(part.birth)
                yield from below

    def _places(self, lives: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self._place[id(life)] for life in lives if id(life) in self._place)

    def _by_node(self, of: Callable[[int], int], now: int) -> Any:
        """Return `of(number)` of each backward operator's node; without a number, the value before it."""
        found = np.full(len(self._phases), -1)
        for t, phase in enumerate(self._phases):
            if phase == BACKWARD:
                order = self._step.orders[t]
                found[t] = now = now if order < 0 else of(order)
        return found

    def _maker(self, order: int) -> int:
        """Return the first operator that ran when a node had its number."""
        return int(np.searchsorted(self._numbers, order, side="right"))

    def _needed(self) -> Iterator[Any]:
        """Yield for each segment the operators of earlier segments, outside of blocks, that it depends on."""
        step = self._step
        read_by, read_at = defaultdict[int, set[int]](set), defaultdict[int, list[int]](list)
        for life, times in step.reads.items():
            for t, segment in zip(times, np.searchsorted(self._first[1:], times, side="right"), strict=True):
                read_by[int(segment)].add(life)
                read_at[t].append(life)
        for segment, begin in enumerate(self._first[:-1]):
            # follow dependencies back from the segment's reads until a block's result: a rank that has the segment runs
            # these operators too
            left, looked_at, found = list(read_by[segment]), set(read_by[segment]), set[int]()
            while left:
                life = left.pop()
                own = [t for t in step.writes.get(life, ()) if t < begin]
                found.update(own)
                if life in step.computed:
                    # a node with several operators is identified by the first of them
                    found.update(int(np.searchsorted(self._numbers, self._numbers[t])) for t in own)
                more = {other for t in own for other in read_at[t]} - looked_at
                looked_at |= more
                left += more
            yield _whole(sorted(found))

    def _held(self, life: Any) -> int:
        """Return the last operator at which something other than autograd holds a storage. Autograd counts too for
        storages that a backward pass makes, because they may belong to a graph that is created and used there.
        """
        if id(life) in self._step.integers:
            # a call has it
            return int(self._first[-1]) - 1
        death = self._last if life.death is None else life.death
        if self._phases[life.birth] == BACKWARD:
            return int(max(death, self._kept_again.get(id(life), 0)))
        if self._values and any(use.life is life for use in self._step.uses):
            return int(min(death, max(life.birth, self._step.read_last.get(id(life), 0))))
        return int(death)

    def _uses(self) -> Any:
        ends = np.array([call.end for call in self._calls])
        listed = {id(call): i for i, call in enumerate(self._calls)}
        places = {n: listed[id(call)] for n, call in enumerate(self._step.calls) if id(call) in listed}
        for use in self._step.uses:
            # not for a graph that the backward pass creates, as for a chunk
            if id(use.life) in self._place and self._phases[use.start] != BACKWARD:
                # an operator's inputs are saved before it is counted, so the block is more precise than the position
                own = places.get(use.call, int(np.searchsorted(ends, use.start, side="right")))
                maker = -1 if use.order < 0 else self._maker(use.order)
                end, read = self._last if use.end is None else use.end, -1 if use.read is None else use.read
                yield self._place[id(use.life)], own, end, maker, read

    def _parameters(self, kinds: dict[str, dict[str, Any]]) -> Any:
        state: dict[str, int] = {}
        needed_by = defaultdict[int, set[int]](set)
        for segment, operators in enumerate(self._needs):
            for t in operators:
                needed_by[int(t)].add(segment)
        for life in self._step.lives:
            if life.kind == STATE:
                owner = life.name.rpartition(".")[0]
                state[owner] = state.get(owner, 0) + life.n_bytes
        for name, life in kinds[PARAMETERS].items():
            if name in self._step.trained:
                gradient = kinds[GRADIENTS].get(f"{name}.grad")
                reads, homes = self._step.readers.get(name, ()), homes_of(self._step, self._calls, name)
                segments = readers_of(self._step, self._calls, name).union(*(needed_by[t] for t in reads))
                yield Parameter(
                    name=name,
                    n_bytes=life.n_bytes,
                    gradient_bytes=0 if gradient is None else gradient.n_bytes,
                    state_bytes=state.get(name, 0),
                    segments=tuple(sorted(segments)),
                    block=next(iter(homes)) if len(homes) == 1 and homes >= segments else None,
                )


def _whole(numbers: Any) -> Any:
    return np.fromiter(numbers, dtype=np.int64)
