"""Search for the best set of non-overlapping regions of a block, by dynamic programming with a beam.

A label is one way to compute all rows before a place. It has the memory of the rows that are still to be read (its
state), the bytes saved for the backward pass, and the cost. A step extends a label by one row computed whole, or by a
region that begins at the place. Of the labels with equal state the cheapest is kept; in training, also those that cost
more and save less. No optimum is lost unless there are more than BEAM labels at one place.

A step between two states takes the same bytes for all labels and in all searches, apart from the bytes that the label
already keeps for the backward pass. It is computed once.

In inference, the bytes of each step equal those of `chunk_bytes`. In training they are derived from the saved bytes of
the label, and from the pending gradients of the block without regions; `choose_chunks` counts the resulting plan again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from lightning_amp.graph.peak import block_bytes
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.candidates import RegionCandidate
from lightning_amp.techniques.chunk.regions.chunk_bytes import result_bytes
from lightning_amp.techniques.chunk.regions.region import Region

BEAM = 64
"""Labels kept at one place; with 16, a larger budget gave a slower plan in 8 of 96 pairs."""
FIRST_BEAM = 8
"""Beam of a first, quick search, whose result bounds the second one."""
MOST_STEPS = 40_000
"""Steps of one search in training, of a label by a row or a region; with more rows and regions the beam is narrower."""


@dataclass(eq=False, slots=True)
class _State:
    """Memory that is still needed after the rows before a place.

    Attributes:
        homes: Pairs (row, its memory) of rows that are still to be read; memory ~i is that of a region's output i.
        saved: Memory in `homes` that is also kept for the backward pass.
        row: Step that computes the next row whole; None until computed.
        regions: Steps of the regions that begin here.
    """

    homes: tuple[tuple[int, int], ...] = ()
    saved: frozenset[int] = frozenset()
    row: "_SearchStep | None" = None
    regions: "dict[RegionCandidate, _SearchStep]" = field(default_factory=dict)


class _SearchStep(NamedTuple):
    """Step from one state to another. Bytes do not include the `gone_bytes` of the label.

    Attributes:
        after: The new state.
        peak_bytes: Peak, before the pieces of the region.
        forward_bytes, backward_bytes: Bytes alive in addition to a piece of the region, in either pass.
        gone_bytes: Bytes that this step keeps for the backward pass and that no later row reads.
        saved_bytes: All bytes kept for the backward pass.
    """

    after: _State
    peak_bytes: int
    forward_bytes: int
    backward_bytes: int
    gone_bytes: int
    saved_bytes: int


class Label(NamedTuple):
    """One way to have computed all rows before a place.

    Attributes:
        cost: Cost of the regions so far.
        gone_bytes: Bytes kept for the backward pass that no later row reads.
        saved_bytes: All bytes kept for the backward pass.
        peak_bytes: Peak so far.
        regions: Regions so far.
        state: Memory that is still needed.
    """

    cost: float = 0.0
    gone_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0
    regions: tuple[Region, ...] = ()
    state: _State = _State()


class Line:
    """Search over the rows of one table in order, with cached states and steps."""

    def __init__(self, table: Table, *, train: bool) -> None:
        self.rows, self.train = table.rows, train
        self.plain = block_bytes(table.rows, table.outputs, train=train)
        """Bytes of the block without regions."""
        alone = [replace(row, over=-1) for row in table.rows]
        self.whole_bytes = block_bytes(alone, table.outputs, train=train).peak_bytes
        """Peak of the unmodified block, with every result in separate memory."""
        self.outputs, n = table.outputs, len(table.rows)
        # memory i is that of row i in the block as it is, and memory ~i that of row i as an output of a region
        self._size = {i: row.n_bytes for i, row in enumerate(table.rows)}
        self._size |= {~i: result_bytes(row) for i, row in enumerate(table.rows)}
        # of every place between rows, the rows before it that are read behind it
        self._reads = [
            [k for k in range(place) if table.rows[k].kind == OPERATOR and table.rows[k].last_use >= place]
            for place in range(n + 1)
        ]
        self.beside_saved = [0] * n
        """Bytes of a row's backward pass in addition to the results and the tensors saved up to this row."""
        saved, hidden = set[int](), 0
        results = {s for k in table.outputs if self.is_made(s := table.rows[k].storage)}
        for i, row in enumerate(table.rows if train else ()):
            saved |= {s for s in row.saved if self.is_made(s)}
            hidden += row.hidden_bytes
            if row.needs_grad:
                self.beside_saved[i] = self.plain.backward[i] - self.bytes(saved | results) - hidden
        self.steps, self.narrowed = 0, False
        """Number of steps of all searches so far, and whether one of them had a narrower beam than `BEAM`."""
        # of every place, the one object for each state
        self._states: list[dict[object, _State]] = [{} for _ in range(n + 1)]

    def held(self) -> list[int]:
        """Return the bytes alive just before every row, without regions and without tensors that are only saved."""
        alive = [{self.rows[k].storage for k in reads} for reads in self._reads[:-1]]
        return [sum(self.rows[s].n_bytes for s in storages if self.rows[s].kind == OPERATOR) for storages in alive]

    def search(self, candidates: Sequence[RegionCandidate], budget: int | None) -> Label | None:
        """Return the final label of least cost within a budget, or of least peak without one; None if there is none."""
        # a region is a step from its first row to the row after its last, so that regions of a plan cannot overlap
        starting: dict[int, list[RegionCandidate]] = {}
        for candidate in candidates:
            starting.setdefault(candidate.region.first, []).append(candidate)
        # the quick search gives an upper bound, which prunes labels of the second one
        found = self._search(starting, budget, FIRST_BEAM, inf)
        beam = BEAM
        if self.train and MOST_STEPS // (len(self.rows) + len(candidates)) < beam:
            beam, self.narrowed = max(FIRST_BEAM, MOST_STEPS // (len(self.rows) + len(candidates))), True
        best = self._search(starting, budget, beam, inf if found is None else _measure(found, budget))
        return found if best is None else best

    def _search(
        self, starting: Mapping[int, Sequence[RegionCandidate]], budget: int | None, beam: int, most: float
    ) -> Label | None:
        at: list[list[Label]] = [[] for _ in range(len(self.rows) + 1)]
        at[0] = [Label(state=self.state(0, (), frozenset()))]
        for place in range(len(self.rows)):
            for label in _best(at[place], budget, beam):
                self.steps += 1 + len(starting.get(place, ()))
                for end, found in self._steps(place, label, starting.get(place, ()), budget, most):
                    if _measure(found, budget) <= most:
                        at[end].append(found)
            at[place] = []
        return next(iter(_best(at[-1], budget, beam)), None)

    def _steps(
        self, place: int, label: Label, candidates: Sequence[RegionCandidate], budget: int | None, most: float
    ) -> Iterator[tuple[int, Label]]:
        state = label.state
        if state.row is None:
            moved = _Moved(self, state)
            if self.rows[place].kind == OPERATOR:
                moved.row(place, over=True)
            state.row = moved.to(place + 1, self._reads[place + 1])
        if budget is None or label.gone_bytes + state.row.peak_bytes <= budget:
            yield place + 1, self._behind(label, state.row)
        for candidate in candidates:
            if budget is not None and label.cost + candidate.least_cost > most:
                # checked before its bytes are counted, which is most of the work
                continue
            step = state.regions.get(candidate)
            if step is None:
                step = state.regions[candidate] = self._region(candidate, state)
            # use as few pieces as the budget allows
            gone = label.gone_bytes
            if budget is not None and gone + step.peak_bytes > budget:
                continue
            cut = candidate.cut(budget, gone + step.forward_bytes, gone + step.backward_bytes)
            if cut is not None:
                region, cost = candidate.with_pieces(cut[0])
                yield (
                    candidate.region.last + 1,
                    Label(
                        label.cost + cost,
                        gone + step.gone_bytes,
                        gone + step.saved_bytes,
                        max(label.peak_bytes, gone + step.peak_bytes, cut[1]),
                        (*label.regions, region),
                        step.after,
                    ),
                )

    @staticmethod
    def _behind(label: Label, step: _SearchStep) -> Label:
        """Return the label after a row that is computed whole."""
        return Label(
            label.cost,
            label.gone_bytes + step.gone_bytes,
            label.gone_bytes + step.saved_bytes,
            max(label.peak_bytes, label.gone_bytes + step.peak_bytes),
            label.regions,
            step.after,
        )

    def _region(self, candidate: RegionCandidate, state: _State) -> _SearchStep:
        """Return the step of a region, without its pieces: `_steps` adds their bytes and cost by their number."""
        moved = _Moved(self, state)
        for i, needed in candidate.before:
            moved.row(i)
            moved.forget(needed)
        homes = moved.homes
        # outputs have their full size before the first piece, or are written over an input
        # ~i and not i: a view that a region returns is copied to separate memory, while row i itself has none
        homes |= {i: homes[candidate.over[i]] if i in candidate.over else ~i for i in candidate.outputs}
        if candidate.learns:
            moved.saved |= {home for i in candidate.inputs if (home := homes.get(i)) is not None}
        forward = moved.alive() + moved.gone
        backward = moved.kept() + moved.gone + candidate.gradient_bytes if candidate.learns else 0
        step = moved.to(candidate.region.last + 1, self._reads[candidate.region.last + 1])
        return step._replace(forward_bytes=forward, backward_bytes=backward)

    def state(self, place: int, homes: tuple[tuple[int, int], ...], saved: frozenset[int]) -> _State:
        """Return the single object for equal states at a place."""
        return self._states[place].setdefault((homes, saved), _State(homes, saved))

    def bytes(self, homes: Collection[int]) -> int:
        """Return the total size of some memory."""
        return sum(map(self._size.__getitem__, homes))

    def is_made(self, home: int) -> bool:
        """Return whether memory is allocated by the block, and not an argument's."""
        return home < 0 or self.rows[home].kind == OPERATOR


class _Moved:
    """Tracks memory while rows are computed one after the other from a state.

    Attributes:
        homes: Memory of each row.
        saved: Memory that is kept for the backward pass.
        gone: Bytes that are kept for the backward pass and that no later row reads.
        peak: Peak so far.
    """

    def __init__(self, line: Line, state: _State) -> None:
        self._line = line
        self.homes: dict[int, int | None] = dict(state.homes)
        self.saved = set(state.saved)
        self.gone = self.peak = 0

    def row(self, i: int, *, over: bool = False) -> None:
        """Compute one row whole; with `over`, in the memory of the argument that it may overwrite."""
        row, homes, line = self._line.rows[i], self.homes, self._line
        homes[i] = next(iter(self._homes(i, row.storage)), None)
        if over and row.over >= 0:
            homes[i] = homes.pop(row.over)
        if line.train:
            self.saved.update(home for s in row.saved for home in self._homes(i, s) if home is not None)
            self.gone += row.hidden_bytes
        self.peak = max(self.peak, self.alive() + self.gone + row.forward_bytes)
        if line.train and row.needs_grad:
            self.peak = max(self.peak, self.kept() + self.gone + line.beside_saved[i])

    def forget(self, needed: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Drop rows that are not needed, and return the others with their memory."""
        # in the order of the rows, because the tuple identifies the state: equal states must be one object
        kept = tuple((k, home) for k in needed if (home := self.homes.get(k)) is not None)
        self.homes = dict(kept)
        gone = self.saved.difference(self.homes.values())
        self.gone += self._line.bytes(gone)
        self.saved -= gone
        return kept

    def to(self, place: int, needed: Sequence[int]) -> _SearchStep:
        """Return the step to a place before which these rows are needed."""
        saved_bytes = self.gone + self._line.bytes(self.saved)
        kept = self.forget(needed)
        return _SearchStep(
            self._line.state(place, kept, frozenset(self.saved)), self.peak, 0, 0, self.gone, saved_bytes
        )

    def alive(self) -> int:
        """Return the bytes of all live memory, without `gone`."""
        return self._line.bytes({home for home in self.homes.values() if home is not None} | self.saved)

    def kept(self) -> int:
        """Return the bytes alive when the backward pass gets here: saved memory, and all results of the block."""
        line = self._line
        results = {self.homes.get(k, line.rows[k].storage) for k in line.outputs}
        return line.bytes(self.saved | {h for h in results if h is not None and line.is_made(h)})

    def _homes(self, i: int, storage: int) -> list[int | None]:
        """Return the memory of `storage`, which row i makes or shares; view outputs of a region are separate."""
        if storage == i:
            return [i]
        rows = self._line.rows
        return [self.homes.get(k) for k in rows[i].inputs if rows[k].storage == storage]


def _measure(label: Label, budget: int | None) -> float:
    """Return the quantity that a search minimizes."""
    return label.peak_bytes if budget is None else label.cost


def _best(labels: Sequence[Label], budget: int | None, beam: int) -> list[Label]:
    """Return the labels that no other label with the same state dominates, at most `beam`."""

    def order(label: Label) -> tuple[float, int, float]:
        return _measure(label, budget), label.gone_bytes, label.cost

    least: dict[int, int] = {}
    kept = list[Label]()
    for label in sorted(labels, key=order):
        if label.gone_bytes < least.get(id(label.state), label.gone_bytes + 1):
            least[id(label.state)] = label.gone_bytes
            kept.append(label)
    if len(kept) <= beam:
        return kept
    # of labels with any state: for every saved size the cheapest label, from least cost to least saved bytes
    below = list(accumulate((x.saved_bytes for x in kept), min, initial=kept[0].saved_bytes + 1))
    front = [x for x, before in zip(kept, below, strict=False) if x.saved_bytes < before]
    if len(front) >= beam:
        return [front[n * (len(front) - 1) // (beam - 1)] for n in range(beam)]
    chosen = {id(x) for x in front}
    rest = [x for x in kept if id(x) not in chosen]
    return sorted([*front, *rest[: beam - len(front)]], key=lambda label: _measure(label, budget))
