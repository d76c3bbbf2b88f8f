"""Search the best set of regions of a block's rows by dynamic programming with a beam.

A label says how the rows before a place can be computed: which memory the rows live in that are still to be read, what
is saved for the backward pass, what it costs. From a label the line goes on by one row computed whole, or by a region
that begins there. Of labels that leave the same behind, the cheapest goes on (in training all that save less for what
they cost more), so that nothing is lost unless there are more than BEAM at one place.

What the rows still to be read live in is a state. A step from one state to the next needs the same bytes for all labels
of that state and in all searches, besides the bytes that a label keeps already, and is computed once.

In inference the bytes of every step are those of `chunk_bytes`. In training they follow from what a label saves, and
from the gradients that wait where nothing is cut; `choose_chunks` counts the plan that is found once more.
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
"""Labels at one place; with 16 of them a larger budget had a slower plan in 8 of 96 pairs."""
FIRST_BEAM = 8
"""Of a first search. What it finds bounds the second one."""


@dataclass(eq=False, slots=True)
class _State:
    """What the rows before a place leave behind.

    Attributes:
        homes: (row, memory it lies in) of rows that are still to be read; memory ~i is that of a region's output i.
        saved: Memory of `homes` that is kept for the backward pass.
        row: The next row computed whole.
        regions: Regions that begin here.
    """

    homes: tuple[tuple[int, int], ...] = ()
    saved: frozenset[int] = frozenset()
    row: "_SearchStep | None" = None
    regions: "dict[RegionCandidate, _SearchStep]" = field(default_factory=dict)


class _SearchStep(NamedTuple):
    """From one state to another; bytes are besides those of the label that are read by no row to come.

    Attributes:
        after: The other state.
        peak_bytes: Most until the pieces of the region.
        forward_bytes, backward_bytes: Beside a piece of the region, in either pass.
        gone_bytes: Kept for the backward pass by this step, and read by no row to come.
        saved_bytes: Kept for the backward pass, in all.
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
        cost: Of the regions so far.
        gone_bytes: Kept for the backward pass, and read by no row to come.
        saved_bytes: Kept for the backward pass, in all.
        peak_bytes: Most so far.
        regions: So far.
        state: What it leaves behind.
    """

    cost: float = 0.0
    gone_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0
    regions: tuple[Region, ...] = ()
    state: _State = _State()


class Line:
    """The rows of a table in their order, and what every step holds."""

    def __init__(self, table: Table, *, train: bool) -> None:
        self.rows, self.train = table.rows, train
        self.plain = block_bytes(table.rows, table.outputs, train=train)
        """Of the block without regions."""
        alone = [replace(row, over=-1) for row in table.rows]
        self.whole_bytes = block_bytes(alone, table.outputs, train=train).peak_bytes
        """Peak of the block as it is: every result in separate memory."""
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
        """What a row's backward holds besides the results and what rows up to it have saved."""
        saved, hidden = set[int](), 0
        results = {s for k in table.outputs if self.is_made(s := table.rows[k].storage)}
        for i, row in enumerate(table.rows if train else ()):
            saved |= {s for s in row.saved if self.is_made(s)}
            hidden += row.hidden_bytes
            if row.needs_grad:
                self.beside_saved[i] = self.plain.backward[i] - self.bytes(saved | results) - hidden
        # of every place, the one object for each state
        self._states: list[dict[object, _State]] = [{} for _ in range(n + 1)]

    def held(self) -> list[int]:
        """Bytes alive just before every row, without regions and without what is only saved."""
        alive = [{self.rows[k].storage for k in reads} for reads in self._reads[:-1]]
        return [sum(self.rows[s].n_bytes for s in storages if self.rows[s].kind == OPERATOR) for storages in alive]

    def search(self, candidates: Sequence[RegionCandidate], budget: int | None) -> Label | None:
        """The cheapest label at the end within a budget; without one, that of the least peak. None if there is none."""
        # a region is a step from its first row to the row behind its last
        # a step over a region never begins inside of another one, so that regions of one plan share no row by
        # construction
        starting: dict[int, list[RegionCandidate]] = {}
        for candidate in candidates:
            starting.setdefault(candidate.region.first, []).append(candidate)
        # no label goes on that is worse already than what a search with few labels has found
        found = self._search(starting, budget, FIRST_BEAM, inf)
        best = self._search(starting, budget, BEAM, inf if found is None else _measure(found, budget))
        return found if best is None else best

    def _search(
        self, starting: Mapping[int, Sequence[RegionCandidate]], budget: int | None, beam: int, most: float
    ) -> Label | None:
        at: list[list[Label]] = [[] for _ in range(len(self.rows) + 1)]
        at[0] = [Label(state=self.state(0, (), frozenset()))]
        for place in range(len(self.rows)):
            for label in _best(at[place], budget, beam):
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
                # before its bytes are counted, which is most of the work
                continue
            step = state.regions.get(candidate)
            if step is None:
                step = state.regions[candidate] = self._region(candidate, state)
            # in as few pieces as the budget allows
            gone = label.gone_bytes
            if budget is not None and gone + step.peak_bytes > budget:
                continue
            cut = candidate.cut(budget, gone + step.forward_bytes, gone + step.backward_bytes)
            if cut is not None:
                region, cost = candidate.with_pieces(cut[0])
                found = self._behind(label, step)
                yield (
                    candidate.region.last + 1,
                    found._replace(
                        cost=label.cost + cost,
                        peak_bytes=max(found.peak_bytes, cut[1]),
                        regions=(*label.regions, region),
                    ),
                )

    @staticmethod
    def _behind(label: Label, step: _SearchStep) -> Label:
        """The label behind a step."""
        return Label(
            label.cost,
            label.gone_bytes + step.gone_bytes,
            label.gone_bytes + step.saved_bytes,
            max(label.peak_bytes, label.gone_bytes + step.peak_bytes),
            label.regions,
            step.after,
        )

    def _region(self, candidate: RegionCandidate, state: _State) -> _SearchStep:
        """Compute a region, of which bytes and cost depend on the number of its pieces."""
        moved = _Moved(self, state)
        for i, needed in candidate.before:
            moved.row(i)
            moved.forget(needed)
        homes = moved.homes
        # outputs are made whole before the first piece, or take the place of an input
        # ~i and not i: a view that a region hands on is whole, separate memory, where row i as it is has none of its
        # own
        homes |= {i: homes[candidate.over[i]] if i in candidate.over else ~i for i in candidate.outputs}
        if candidate.learns:
            moved.saved |= {home for i in candidate.inputs if (home := homes.get(i)) is not None}
        forward = moved.alive() + moved.gone
        backward = moved.kept() + moved.gone + candidate.gradient_bytes if candidate.learns else 0
        step = moved.to(candidate.region.last + 1, self._reads[candidate.region.last + 1])
        return step._replace(forward_bytes=forward, backward_bytes=backward)

    def state(self, place: int, homes: tuple[tuple[int, int], ...], saved: frozenset[int]) -> _State:
        """The one object for what is left behind at a place."""
        return self._states[place].setdefault((homes, saved), _State(homes, saved))

    def bytes(self, homes: Collection[int]) -> int:
        """Of some memory."""
        return sum(map(self._size.__getitem__, homes))

    def is_made(self, home: int) -> bool:
        """Whether memory is made by the block, and not an argument's."""
        return home < 0 or self.rows[home].kind == OPERATOR


class _Moved:
    """Rows that are computed from a state on, one after the other.

    Attributes:
        homes: Memory that rows lie in.
        saved: Memory that is kept for the backward pass.
        gone: Bytes that are kept for it, and read by no row to come.
        peak: Most bytes so far.
    """

    def __init__(self, line: Line, state: _State) -> None:
        self._line = line
        self.homes: dict[int, int | None] = dict(state.homes)
        self.saved = set(state.saved)
        self.gone = self.peak = 0

    def row(self, i: int, *, over: bool = False) -> None:
        """Compute one row whole, `over` the memory of another one where it can be."""
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
        """Let go of rows that are not needed, and return the others."""
        # in the order of the rows, for the tuple is a part of the name of a state: equal states have to be one object
        kept = tuple((k, home) for k in needed if (home := self.homes.get(k)) is not None)
        self.homes = dict(kept)
        gone = self.saved.difference(self.homes.values())
        self.gone += self._line.bytes(gone)
        self.saved -= gone
        return kept

    def to(self, place: int, needed: Sequence[int]) -> _SearchStep:
        """The step to a place before which these rows are needed."""
        saved_bytes = self.gone + self._line.bytes(self.saved)
        kept = self.forget(needed)
        return _SearchStep(
            self._line.state(place, kept, frozenset(self.saved)), self.peak, 0, 0, self.gone, saved_bytes
        )

    def alive(self) -> int:
        """Bytes of all that is there, without those that are gone."""
        return self._line.bytes({home for home in self.homes.values() if home is not None} | self.saved)

    def kept(self) -> int:
        """While a backward pass comes here: what is saved, and results of the block, which may not be there yet."""
        line = self._line
        results = {self.homes.get(k, line.rows[k].storage) for k in line.outputs}
        return line.bytes(self.saved | {h for h in results if h is not None and line.is_made(h)})

    def _homes(self, i: int, storage: int) -> list[int | None]:
        """Where the memory lies that a row makes or shares with arguments; views that a region hands on lie apart."""
        if storage == i:
            return [i]
        rows = self._line.rows
        return [self.homes.get(k) for k in rows[i].inputs if rows[k].storage == storage]


def _measure(label: Label, budget: int | None) -> float:
    """What a search makes as small as it can."""
    return label.peak_bytes if budget is None else label.cost


def _best(labels: Sequence[Label], budget: int | None, beam: int) -> list[Label]:
    """Of labels that leave the same behind, those that no other is better than; no more than a beam in all."""

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
    # of equal behind or not: the cheapest of every amount that is saved, from the least cost to the least saved
    below = list(accumulate((x.saved_bytes for x in kept), min, initial=kept[0].saved_bytes + 1))
    front = [x for x, before in zip(kept, below, strict=False) if x.saved_bytes < before]
    if len(front) >= beam:
        return [front[n * (len(front) - 1) // (beam - 1)] for n in range(beam)]
    chosen = {id(x) for x in front}
    rest = [x for x in kept if id(x) not in chosen]
    return sorted([*front, *rest[: beam - len(front)]], key=lambda label: _measure(label, budget))
