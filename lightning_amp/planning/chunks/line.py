"""The best set of regions on the line of a block's rows: dynamic programming with a beam.

A label says how the rows before a place can be computed: which memory the rows live in that are still to be read, what
is saved for the backward pass, what it costs. From a label the line goes on by one row computed whole, or by a region
that begins there. Of labels that leave the same behind, the cheapest goes on (in training all that save less for what
they cost more), so that nothing is lost unless there are more than BEAM at one place.

In inference the bytes of every step are those of `chunk_bytes`. In training they follow from what a label saves, and
from the gradients that wait where nothing is cut; `choose_chunks` counts the plan that is found once more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_amp.graph.peak import block_bytes
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.planning.chunks.candidates import Candidate
from lightning_amp.planning.chunks.chunk_bytes import result_bytes
from lightning_amp.planning.chunks.region import Region

BEAM = 64
"""Labels at one place; with 16 of them a larger budget had a slower plan in 8 of 96 pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """One way to have computed all rows before a place.

    Attributes:
        cost: Of the regions so far.
        homes: (row, memory it lies in) of rows that are still to be read; memory ~i is that of a region's output i.
        saved: Memory of `homes` that is kept for the backward pass.
        gone_bytes: Kept for the backward pass, and read by no row to come.
        saved_bytes: Kept for the backward pass, in all.
        peak_bytes: Most so far.
        regions: So far.
    """

    cost: float = 0.0
    homes: tuple[tuple[int, int], ...] = ()
    saved: frozenset[int] = frozenset()
    gone_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0
    regions: tuple[Region, ...] = ()


class Line:
    """The rows of a table in their order, and what every step holds."""

    def __init__(self, table: Table, *, train: bool) -> None:
        self.rows, self.train = table.rows, train
        self.plain = block_bytes(table, train=train)
        """Of the block without regions."""
        alone = tuple(replace(row, over=-1) for row in table.rows)
        self.whole_bytes = block_bytes(replace(table, rows=alone), train=train).peak_bytes
        """Peak of the block as it is: every result in memory of its own."""
        self._outputs, n = table.outputs, len(table.rows)
        self._size = {i: row.n_bytes for i, row in enumerate(table.rows)}
        self._size |= {~i: result_bytes(row) for i, row in enumerate(table.rows)}
        self._reads = [
            [k for k in range(p) if table.rows[k].kind == OPERATOR and table.rows[k].last_use >= p]
            for p in range(n + 1)
        ]
        self._fixed = self._not_saved(table) if train else [0] * n

    def held(self) -> list[int]:
        """Bytes alive just before every row, without regions and without what is only saved."""
        alive = [{self.rows[k].storage for k in reads} for reads in self._reads[:-1]]
        return [
            sum(self.rows[s].n_bytes for s in storages if self.rows[s].kind == OPERATOR) for storages in alive
        ]

    def bytes_of_rows(self) -> list[int]:
        """The more of forward and backward pass of every row, without regions."""
        backward = self.plain.backward or self.plain.forward
        return [max(pair) for pair in zip(self.plain.forward, backward, strict=True)]

    def search(self, candidates: Sequence[Candidate], budget: int | None) -> Label | None:
        """The cheapest label at the end within a budget; without one, that of the least peak. None if there is none."""
        starting: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            starting.setdefault(candidate.region.first, []).append(candidate)
        at: list[list[Label]] = [[] for _ in range(len(self.rows) + 1)]
        at[0] = [Label()]
        for place in range(len(self.rows)):
            for label in _best(at[place], by_peak=budget is None):
                for end, found in self._steps(place, label, starting.get(place, ()), budget):
                    at[end].append(found)
            at[place] = []
        return next(iter(_best(at[-1], by_peak=budget is None)), None)

    def _steps(
        self, place: int, label: Label, candidates: Sequence[Candidate], budget: int | None
    ) -> Iterator[tuple[int, Label]]:
        whole = self._row(place, label)
        if budget is None or whole.peak_bytes <= budget:
            yield place + 1, whole
        for candidate in candidates:
            found = self._region(candidate, label, budget)
            if found is not None:
                yield candidate.region.last + 1, found

    def _row(self, i: int, label: Label, needed: Sequence[int] | None = None) -> Label:
        """Compute one row whole; `needed` are the rows that are still to be read then."""
        row = self.rows[i]
        if row.kind != OPERATOR:
            return label
        homes: dict[int, int | None] = dict(label.homes)
        homes[i] = i if row.storage == i else self._home(i, homes, row.storage)
        if row.over >= 0 and needed is None:
            homes[i] = homes.pop(row.over)
        saved, gone = label.saved, label.gone_bytes
        if self.train:
            saved = saved | {h for s in row.saved for h in self._homes(i, homes, s)}
            gone += row.hidden_bytes
        peak = self._alive(homes, saved) + gone + row.forward_bytes
        if self.train and row.needs_grad:
            peak = max(peak, self._kept(homes, saved) + gone + self._fixed[i])
        return self._next(self._reads[i + 1] if needed is None else needed, label, homes, saved, gone, peak)

    def _region(self, candidate: Candidate, label: Label, budget: int | None) -> Label | None:
        """Compute a region in as few pieces as the budget allows; None if it allows none."""
        for i, needed in candidate.before:
            label = self._row(i, label, needed)
        if budget is not None and label.peak_bytes > budget:
            return None
        homes: dict[int, int | None] = dict(label.homes)
        homes |= {i: homes[candidate.over[i]] if i in candidate.over else ~i for i in candidate.outputs}
        saved, gone = label.saved, label.gone_bytes
        if candidate.learns:
            saved = saved | {home for i in candidate.inputs if (home := homes.get(i)) is not None}
        forward = self._alive(homes, saved) + gone
        backward = self._kept(homes, saved) + gone + candidate.gradient_bytes if candidate.learns else 0
        cut = candidate.cut(budget, forward, backward)
        if cut is None:
            return None
        n_chunks, peak = cut
        region, cost = candidate.with_pieces(n_chunks)
        found = self._next(self._reads[region.last + 1], label, homes, saved, gone, peak)
        return replace(found, cost=label.cost + cost, regions=(*label.regions, region))

    def _next(
        self,
        needed: Sequence[int],
        label: Label,
        homes: Mapping[int, int | None],
        saved: frozenset[int],
        gone: int,
        peak: int,
    ) -> Label:
        """The label behind a step; rows that nothing reads any more are forgotten."""
        kept = tuple((k, home) for k in needed if (home := homes.get(k)) is not None)
        held = {home for _, home in kept}
        return Label(
            cost=label.cost,
            homes=kept,
            saved=saved & held,
            gone_bytes=gone + self._bytes(saved - held),
            saved_bytes=gone + self._bytes(saved),
            peak_bytes=max(label.peak_bytes, peak),
            regions=label.regions,
        )

    def _home(self, i: int, homes: Mapping[int, int | None], storage: int) -> int | None:
        """Where the memory lies that a row shares with an argument; None for one of the block's arguments."""
        if storage == i:
            return i
        shared = (k for k in self.rows[i].inputs if self.rows[k].storage == storage)
        return homes.get(next(shared, -1))

    def _homes(self, i: int, homes: Mapping[int, int | None], storage: int) -> list[int]:
        """All places of a memory that a row may have saved: views that a region hands on lie apart."""
        if storage == i:
            return [i]
        shared = (k for k in self.rows[i].inputs if self.rows[k].storage == storage)
        return [home for k in shared if (home := homes.get(k)) is not None]

    def _kept(self, homes: Mapping[int, int | None], saved: frozenset[int]) -> int:
        """While a backward pass comes here: what is saved, and results of the block, which may not be there yet."""
        results = {homes.get(k, self.rows[k].storage) for k in self._outputs}
        return self._bytes(saved | {h for h in results if h is not None and self._is_made(h)})

    def _is_made(self, home: int) -> bool:
        return home < 0 or self.rows[home].kind == OPERATOR

    def _alive(self, homes: Mapping[int, int | None], saved: frozenset[int]) -> int:
        return self._bytes({home for home in homes.values() if home is not None} | saved)

    def _bytes(self, homes: set[int] | frozenset[int]) -> int:
        return sum(map(self._size.__getitem__, homes))

    def _not_saved(self, table: Table) -> list[int]:
        """What a row's backward holds beside the results and what rows up to it have saved."""
        found, saved, hidden = [], set[int](), 0
        results = {s for k in table.outputs if self._is_made(s := table.rows[k].storage)}
        for i, row in enumerate(table.rows):
            saved |= {s for s in row.saved if self._is_made(s)}
            hidden += row.hidden_bytes
            kept = self._bytes(saved | results) + hidden
            found.append(self.plain.backward[i] - kept if row.needs_grad else 0)
        return found


def _best(labels: Sequence[Label], *, by_peak: bool) -> list[Label]:
    """Of labels that leave the same behind, those that no other is better than; no more than BEAM in all."""

    def measure(label: Label) -> float:
        return label.peak_bytes if by_peak else label.cost

    found: dict[tuple[object, ...], list[Label]] = {}
    for label in sorted(labels, key=lambda x: (measure(x), x.gone_bytes, x.cost)):
        same = found.setdefault((label.homes, label.saved), [])
        if not same or label.gone_bytes < same[-1].gone_bytes:
            same.append(label)
    kept = sorted((x for same in found.values() for x in same), key=lambda x: (measure(x), x.gone_bytes))
    if len(kept) <= BEAM:
        return kept
    # of equal behind or not: the cheapest of every amount that is saved, from the least cost to the least saved
    least = list(accumulate((x.saved_bytes for x in kept), min, initial=kept[0].saved_bytes + 1))
    front = [x for x, before in zip(kept, least, strict=False) if x.saved_bytes < before]
    if len(front) >= BEAM:
        return [front[n * (len(front) - 1) // (BEAM - 1)] for n in range(BEAM)]
    chosen = {id(x) for x in front}
    rest = [x for x in kept if id(x) not in chosen]
    return sorted([*front, *rest[: BEAM - len(front)]], key=measure)
