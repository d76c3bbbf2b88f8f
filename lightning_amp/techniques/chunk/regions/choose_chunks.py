"""Choose the regions of a block to compute piece by piece under a budget, at the least cost.

    auto    seconds at measured rates
    paper   AutoChunk's macro and micro cost, Equations 8 to 10

Candidates are regions worth choosing from. Rows above the budget are the paper's peak nodes: a region has at least one.
It is left out if a shorter one does the same: if it begins earlier than another, though no fewer bytes are alive there
(find_regions.py), or ends later, though its outputs are no smaller, and covers no further row above the budget. In
training every row that saves counts as one.

Both costs hold the same budget: the peak of the block's live bytes beyond its arguments and parameters, of forward and
backward pass, by chunk_bytes.py. The same table, budget and rates get the same plan.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import floor, log

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.errors import PlanError
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.candidates import Cost, RegionCandidate
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.costs import WEIGHTS, Seconds, Weights, paper_cost
from lightning_amp.techniques.chunk.regions.find_regions import RegionSearch
from lightning_amp.techniques.chunk.regions.region import ChunkPlan, Region
from lightning_amp.techniques.chunk.regions.region_search import Label, Line

POLICIES = ("auto", "paper")
STEPS = 4
"""Searches in which a plan that is above the budget is made smaller by what it is above."""
MOST_ROWS = 60_000
"""Of all regions that are compared for one table, each row as often as it is in one; the examples have 45,000 at most.

A bound of work, so that plans do not depend on the clock. With a tenth of it the U-Net and the Geneformer of the
examples did not fit into 20 % of their bytes, and blocks of 200 to 1,600 rows took 0.7 to 1.3 times as long to plan.
"""
KNOWN = 4
"""Tables of which the search is kept."""
RATIO = 1.01
"""Of two numbers of bytes that plans are made for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What a plan makes as small as it can.

    Attributes:
        policy: "auto" or "paper".
        rates: Of the device.
        weights: Of the paper's terms, under "paper".
    """

    policy: str = "auto"
    rates: Rates = CPU_CORE
    weights: Weights = WEIGHTS

    def __post_init__(self) -> None:
        """Refuse another policy, with a PlanError."""
        if self.policy not in POLICIES:
            raise PlanError(f"policy={self.policy!r} is not supported; allowed are {POLICIES!r}")


class OverBudget(PlanError):
    """A budget that no plan meets.

    Attributes:
        least_bytes: Peak of the plan that takes the least.
        least: That plan, where it is of one block.
    """

    def __init__(self, text: str, least_bytes: int, least: ChunkPlan | None = None) -> None:
        super().__init__(text)
        self.least_bytes, self.least = least_bytes, least


CPU_SECONDS = CostModel()


def choose_chunks(table: Table, budget_bytes: int, *, train: bool = False, costs: CostModel = CPU_SECONDS) -> ChunkPlan:
    """The plan of the least cost whose peak is within a budget; nothing is cut where the block fits as it is.

    Args:
        table: A captured block; for inference captured without gradients.
        budget_bytes: For all that lives beyond arguments and parameters, results included.
        train: Whether a backward pass follows: regions save their inputs, and compute their rows again.
        costs: What is made small.

    Raises:
        OverBudget: The budget cannot be met; the least that can is named.
    """
    search = _search(table, costs, train=train)
    found = search.within(budget_bytes)
    if found is not None:
        return found
    least = search.least
    if least.peak_bytes <= budget_bytes:
        return least
    raise OverBudget(
        f"block {table.block!r} requires at least {least.peak_bytes!r} bytes in chunks ({least.whole_bytes!r} as it"
        f" is), more than the budget of {budget_bytes!r} bytes; raise the budget",
        least.peak_bytes,
        least,
    )


def rung(n_bytes: int) -> int:
    """The largest number of bytes within this one that a plan is made for; of such a number it is the number."""
    # a rung is the whole part of a power, which may have a logarithm a little below that of the power
    return min(n_bytes, int(RATIO ** floor(log(n_bytes + 1, RATIO)))) if n_bytes > 1 else 1


class _PlanSearch:
    """What is known of a table, for all budgets."""

    def __init__(self, table: Table, costs: CostModel, *, train: bool) -> None:
        self._table, self._line = table, Line(table, train=train)
        self._seconds = Seconds(table, costs.rates, train=train)
        paper = partial(paper_cost, table, weights=costs.weights)
        cost: Cost = self._seconds.extra if costs.policy == "auto" else paper
        self._regions = RegionSearch(table, held=self._line.held())
        self._new = partial(RegionCandidate, table, cost=cost, plain=self._line.plain, train=train)
        self._candidates: dict[int, RegionCandidate] = {}
        self._around: dict[frozenset[int], list[RegionCandidate]] = {}
        # no functools.cache of a method, which would keep tables in a reference cycle
        self._plans: dict[int, ChunkPlan | None] = {}

    def within(self, budget_bytes: int) -> ChunkPlan | None:
        """The plan of the least cost within a budget; None if none is found."""
        if budget_bytes not in self._plans:
            self._plans[budget_bytes] = self._within(budget_bytes)
        return self._plans[budget_bytes]

    def _within(self, budget_bytes: int) -> ChunkPlan | None:
        if self._line.plain.peak_bytes <= budget_bytes:
            return self._plan(Label())
        candidates, aim = self._above(budget_bytes), budget_bytes
        while aim > 0 and (label := self._line.search(candidates, aim)) is not None:
            plan = self._plan(label)
            if plan.peak_bytes <= budget_bytes:
                return plan
            # its bytes of a backward pass are not exact; in small steps, or a smaller budget finds a better plan
            aim = min(aim, label.peak_bytes) - max(1, (plan.peak_bytes - budget_bytes) // STEPS)
        return None

    @cached_property
    def least(self) -> ChunkPlan:
        """The plan of the least peak, and of those that have it one of little cost."""
        # the rows above a guess in pieces, until no row between the two is left
        guess = self._line.plain.peak_bytes // 2
        while (found := self._line.search(self._above(guess), None)) is not None and found.peak_bytes <= guess:
            guess = found.peak_bytes - 1
        assert found is not None, "computing everything whole is always possible"
        least = self._plan(found)
        # the line takes a little more bytes for a plan than it has
        label = self._line.search(self._above(least.peak_bytes), int(RATIO * least.peak_bytes))
        other = least if label is None else self._plan(label)
        return other if other.peak_bytes <= least.peak_bytes and other.seconds < least.seconds else least

    def _above(self, budget_bytes: int) -> list[RegionCandidate]:
        """Regions that lower the bytes of a row above a budget."""
        line = self._line
        both = zip(line.plain.forward, line.plain.backward or line.plain.forward, strict=True)
        above = {i for i, pair in enumerate(both) if max(pair) > budget_bytes}
        saving = {i for i, row in enumerate(line.rows) if row.saved or row.hidden_bytes} if line.train else ()
        hot = frozenset(above.union(saving))
        if hot not in self._around:
            found = map(self._candidate, self._regions.around(hot, most_rows=MOST_ROWS))
            self._around[hot] = list(_worth_choosing(found, hot))
        return self._around[hot]

    def _candidate(self, region: Region) -> RegionCandidate:
        # the search keeps its regions, so that no two have one identity
        if id(region) not in self._candidates:
            self._candidates[id(region)] = self._new(region)
        return self._candidates[id(region)]

    def _plan(self, label: Label) -> ChunkPlan:
        return ChunkPlan(
            regions=label.regions,
            peak_bytes=chunk_bytes(self._table, label.regions, train=self._line.train).peak_bytes,
            seconds=self._seconds.of(label.regions),
            whole_bytes=self._line.whole_bytes,
            whole_seconds=self._seconds.whole,
            thinned=self._regions.thinned,
        )


def _worth_choosing(found: Iterable[RegionCandidate], hot: Collection[int]) -> Iterator[RegionCandidate]:
    """Without those that end later than another of the same first row and dim, and are no better."""
    least: dict[tuple[int, int | None], tuple[int, int]] = {}
    for candidate in sorted(found, key=lambda candidate: candidate.region.last):
        region, size = candidate.region, candidate.output_bytes
        key = region.first, region.dims.get(region.first)
        known = least.get(key)
        further = known is None or any(i in hot for i in range(known[1] + 1, region.last + 1))
        if known is None or further or size < known[0]:
            least[key] = size, region.last
            yield candidate


_search = lru_cache(maxsize=KNOWN)(_PlanSearch)
"""Of a table; a block is planned for many budgets, and equal blocks have equal tables."""
