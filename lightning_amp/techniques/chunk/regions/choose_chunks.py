"""Choose the regions of a block that run piece by piece, to fit a memory budget at least cost.

    auto    cost is the predicted time at measured rates
    paper   cost is AutoChunk's macro and micro cost, Equations 8 to 10

A candidate region must contain a row above the budget (a peak node in the paper); in training, every row that saves
tensors counts as one. A region is omitted if a shorter one saves as much: if it begins earlier without fewer bytes
alive there (find_regions.py), or if it ends later without smaller outputs and covers no further row above the budget.

The budget is the same under both costs: it bounds the peak of the block's live bytes beyond its arguments and
parameters, in the forward and backward pass, as counted by chunk_bytes.py. The same table, budget and rates always give
the same plan.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import floor, log

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import PlanError
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.candidates import Cost, RegionCandidate
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.costs import WEIGHTS, HasSpeed, Seconds, Speed, Weights, paper_cost
from lightning_amp.techniques.chunk.regions.find_regions import RegionSearch
from lightning_amp.techniques.chunk.regions.region import ChunkPlan, Region
from lightning_amp.techniques.chunk.regions.region_search import Label, Line

POLICIES = ("auto", "paper")
STEPS = 4
"""Divisor of the excess by which the aim is lowered after a search whose plan is above the budget."""
MOST_ROWS = 60_000
"""Largest number of rows of all compared regions of a table, overlaps counted; the examples have 45,000 at most.

This limits work by count, so that plans do not depend on the clock. With a tenth of it, the U-Net and the Geneformer of
the examples did not fit into 20 % of their bytes, and blocks of 200 to 1,600 rows took 0.7 to 1.3 times as long to
plan.
"""
MOST_ROWS_TRAIN = 16_000
"""The same in training, where a step has many blocks, each planned for several budgets. Least bytes of public blocks
against 60,000: DaViT's third block 11 % more and its second 7 %, FocalNet 3 %, SwinV2 2 %, Mamba2 1 %.
"""
MOST_TRIES = 8
"""Number of searches for one budget."""
KNOWN = 16
"""Number of tables whose searches are cached."""
RATIO = 1.01
"""Ratio of two consecutive budgets for which plans are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Quantity that a plan minimizes.

    Attributes:
        policy: "auto" or "paper".
        rates: Rates of the device that the plan is for; those that matter for chunks are kept.
        weights: Weights of the paper's terms, used with "paper".
    """

    policy: str = "auto"
    rates: HasSpeed = CPU_CORE
    weights: Weights = WEIGHTS

    def __post_init__(self) -> None:
        """Raise PlanError if the policy is unknown."""
        if self.policy not in POLICIES:
            raise PlanError(f"policy={self.policy!r} is not supported; allowed are {POLICIES!r}")
        # so that equal costs are equal keys of the cached searches
        object.__setattr__(self, "rates", Speed.of(self.rates))


class OverBudget(PlanError):
    """Error for a budget that no plan fits.

    Attributes:
        least_bytes: Peak of the plan with the smallest peak.
        least: That plan, if `choose_chunks` raised the error; otherwise None.
    """

    def __init__(self, text: str, least_bytes: int, least: ChunkPlan | None = None) -> None:
        super().__init__(text)
        self.least_bytes, self.least = least_bytes, least


CPU_SECONDS = CostModel()


def choose_chunks(table: Table, budget_bytes: int, *, train: bool = False, costs: CostModel = CPU_SECONDS) -> ChunkPlan:
    """Return the plan of least cost whose peak fits a budget; it has no regions if the block fits without.

    Args:
        table: A captured block; for inference captured without gradients.
        budget_bytes: Budget of everything alive beyond arguments and parameters, results included.
        train: Whether a backward pass follows: regions then save their inputs, and recompute their rows.
        costs: Quantity to minimize.

    Raises:
        OverBudget: No plan fits the budget; the message has the smallest budget that fits.
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
    """Round bytes down to the nearest budget for which plans are made; such a budget is returned unchanged."""
    # `n_bytes + 1`: a rung is a power rounded down, so its logarithm may be slightly below that of the power
    return min(n_bytes, int(RATIO ** floor(log(n_bytes + 1, RATIO)))) if n_bytes > 1 else 1


class _PlanSearch:
    """Cached plans and candidates of one table, for all budgets."""

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
        """Return the plan of least cost that fits a budget; None if none is found."""
        if budget_bytes not in self._plans:
            self._plans[budget_bytes] = self._within(budget_bytes)
        return self._plans[budget_bytes]

    def _within(self, budget_bytes: int) -> ChunkPlan | None:
        if self._line.plain.peak_bytes <= budget_bytes:
            return self._plan(Label())
        candidates, aim, before = self._above(budget_bytes), budget_bytes, self._line.steps
        for _ in range(MOST_TRIES):
            label = self._line.search(candidates, aim) if aim > 0 else None
            if label is None:
                break
            plan = self._plan(label, self._line.steps - before)
            if plan.peak_bytes <= budget_bytes:
                return plan
            # bytes of the backward pass are inexact in the search; with larger steps a smaller budget could give a
            # better plan
            aim = min(aim, label.peak_bytes) - max(1, (plan.peak_bytes - budget_bytes) // STEPS)
        return None

    @cached_property
    def least(self) -> ChunkPlan:
        """Plan with the smallest peak, and a low cost among those."""
        # lower the guess until no row is left between it and the peak of the plan
        guess, before = self._line.plain.peak_bytes // 2, self._line.steps
        while (found := self._line.search(self._above(guess), None)) is not None and found.peak_bytes <= guess:
            guess = found.peak_bytes - 1
        assert found is not None, "computing everything whole is always possible"
        least = self._plan(found)
        # with some slack, because the search counts slightly more bytes for a plan than it takes
        label = self._line.search(self._above(least.peak_bytes), int(RATIO * least.peak_bytes))
        steps = self._line.steps - before
        least = replace(least, steps=steps)
        other = least if label is None else self._plan(label, steps)
        return other if other.peak_bytes <= least.peak_bytes and other.seconds < least.seconds else least

    def _above(self, budget_bytes: int) -> list[RegionCandidate]:
        """Return candidate regions that lower the bytes of a row above a budget."""
        line = self._line
        both = zip(line.plain.forward, line.plain.backward or line.plain.forward, strict=True)
        above = {i for i, pair in enumerate(both) if max(pair) > budget_bytes}
        saving = {i for i, row in enumerate(line.rows) if row.saved or row.hidden_bytes} if line.train else ()
        hot = frozenset(above.union(saving))
        if hot not in self._around:
            found = map(
                self._candidate, self._regions.around(hot, most_rows=MOST_ROWS_TRAIN if line.train else MOST_ROWS)
            )
            self._around[hot] = list(_worth_choosing(found, hot))
        return self._around[hot]

    def _candidate(self, region: Region) -> RegionCandidate:
        # `RegionSearch` keeps its regions alive, so that ids are unique
        if id(region) not in self._candidates:
            self._candidates[id(region)] = self._new(region)
        return self._candidates[id(region)]

    def _plan(self, label: Label, steps: int = 0) -> ChunkPlan:
        return ChunkPlan(
            regions=label.regions,
            peak_bytes=chunk_bytes(self._table, label.regions, train=self._line.train).peak_bytes,
            seconds=self._seconds.of(label.regions),
            whole_bytes=self._line.whole_bytes,
            whole_seconds=self._seconds.whole,
            thinned=self._regions.thinned or self._line.narrowed,
            steps=steps,
        )


def _worth_choosing(found: Iterable[RegionCandidate], hot: Collection[int]) -> Iterator[RegionCandidate]:
    """Omit regions that end later than another with the same first row and dim, without any advantage."""
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
"""Cached by table: a block is planned for many budgets, and equal blocks have equal tables."""
