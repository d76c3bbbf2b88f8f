"""Choose the regions of a block to compute piece by piece under a budget, at the least cost.

    auto    seconds at measured rates (piece_seconds.py)
    paper   AutoChunk's macro and micro cost, Equations 8 to 10 (paper_cost.py)

Both hold the same budget: the peak of the block's live bytes beyond its arguments and parameters, of forward and
backward pass, by chunk_bytes.py. The same table, budget and rates get the same plan.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import floor, log

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.errors import PlanError
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.candidates import Candidates, Cost, RegionCandidate
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.paper_cost import WEIGHTS, Weights, paper_cost
from lightning_amp.techniques.chunk.regions.piece_seconds import Seconds
from lightning_amp.techniques.chunk.regions.region import ChunkPlan
from lightning_amp.techniques.chunk.regions.region_search import Label, Line

POLICIES = ("auto", "paper")
STEPS = 4
"""Searches in which a plan that is above the budget is made smaller by what it is above."""
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
        """Refuse another policy.

        Raises:
            PlanError: It is not known.
        """
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


class _RegionSearch:
    """What is known of a table, for all budgets."""

    def __init__(self, table: Table, costs: CostModel, *, train: bool) -> None:
        self._table, self._line = table, Line(table, train=train)
        self._seconds = Seconds(table, costs.rates, train=train)
        paper = partial(paper_cost, table, weights=costs.weights)
        cost: Cost = self._seconds.extra if costs.policy == "auto" else paper
        self._candidates = Candidates(table, self._line.held(), cost, self._line.plain, train=train)
        self._known: dict[int, ChunkPlan | None] = {}

    def within(self, budget_bytes: int) -> ChunkPlan | None:
        """The plan of the least cost; None if none is found."""
        if budget_bytes not in self._known:
            self._known[budget_bytes] = self._found(budget_bytes)
        return self._known[budget_bytes]

    def _found(self, budget_bytes: int) -> ChunkPlan | None:
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
        return self._candidates.around(frozenset(above.union(saving)))

    def _plan(self, label: Label) -> ChunkPlan:
        return ChunkPlan(
            regions=label.regions,
            peak_bytes=chunk_bytes(self._table, label.regions, train=self._line.train).peak_bytes,
            seconds=self._seconds.of(label.regions),
            whole_bytes=self._line.whole_bytes,
            whole_seconds=self._seconds.whole,
            thinned=self._candidates.thinned,
        )


_search = lru_cache(maxsize=KNOWN)(_RegionSearch)
"""Of a table; a block is planned for many budgets, and equal blocks have equal tables."""
