"""Choose the grid of ranks, and which of its axes has which role, by the seconds of a step in dry runs.

One forward pass finds the layouts for all pairs (x, y), one dry run of each pair says what a rank computes, sends and
holds; the rest of a grid follows from that (grid_seconds.py). The grid that is taken is counted as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from lightning_amp.costs.link_seconds import Links
from lightning_amp.dist.splits import Sent
from lightning_amp.errors import AmpError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.planning.plan.plan import Explanation
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.tensor3d.grid_seconds import (
    DryRun,
    GridCost,
    Message,
    factorings,
    grid_cost,
    ranked,
)

SHOWN = 5
"""Grids by name."""
EVERY_PAIR = 15
"""Pairs (x, y), as of 16 ranks, of which those of more ranks are run until they are clearly slower; of more pairs until
they are slower at all."""
CLEARLY = 2.0
TRIES = 4
"""Grids that are counted as they are, where the peak of the one before exceeds the budget."""

Pair = tuple[int, int]


class Steps(Protocol):
    """As of DrySteps."""

    spec: Any
    ranks: int
    run_ranks: int
    budget: int | None
    sent: list[Sent]

    def messages(self) -> tuple[Message, ...]:
        """Of the last batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class CountedRun:
    """A dry run with what was counted in it."""

    run: DryRun
    step: CountedStep
    sent: list[Sent]


def choose_grid(
    steps: Steps,
    technique: Any,
    look: Callable[[Mapping[str, Callable[..., Any]]], None],
    count: Callable[[], CountedStep],
    links: Links,
) -> tuple[CountedStep, tuple[str, ...]]:
    """Set the spec and the model axis of `steps`; returns the step with it, and notes on the choice.

    Args:
        steps: With a spec whose grid is given, or is chosen.
        technique: The module of a technique with `layouts` and `on_grid`.
        look, count: As of `DrySteps.choose`.
        links: Between the ranks.

    Raises:
        AmpError: The step can be run on no grid.
    """
    spec: Any = steps.spec
    given = spec.sizes if spec.grid else None
    ranks, budget = steps.run_ranks, steps.budget
    grids = [
        grid
        for grid in factorings(ranks)
        if (grid[:3] == given if given else prod(grid[:3]) > 1 or ranks == 1)
    ]
    pairs = sorted({pair for x, y, *_ in grids for pair in ((x, y), (y, x))}, key=lambda p: (prod(p), p))
    layouts: dict[Pair, str] = technique.layouts(pairs, look)

    def counted(sizes: tuple[int, int, int], copies: int, own: str) -> CountedRun:
        steps.spec = technique.on_grid(spec, sizes, own, exchanged=False)
        steps.ranks, steps.run_ranks = steps.spec.model_ranks, prod(sizes) * copies
        step = count()
        of_axes = dict(zip(("x", "y", "z", "data"), (*sizes, copies), strict=True))
        run = DryRun(
            sizes=of_axes, seconds=step.chain.seconds, messages=steps.messages(), profile=step.profile
        )
        return CountedRun(run=run, step=step, sent=list(steps.sent))

    # where z and the copies are open, two of each show what they send
    z, copies = (given[2], ranks // prod(given)) if given else (2, 2)
    runs, costs, refused = dict[Pair, CountedRun](), list[GridCost](), list[AmpError]()
    slower = CLEARLY if len(pairs) <= EVERY_PAIR else 1.0
    for size in sorted({prod(pair) for pair in pairs}):
        for pair in (pair for pair in pairs if prod(pair) == size):
            try:
                runs[pair] = counted((*pair, z), copies, layouts[pair])
            except AmpError as error:
                refused.append(error)
        level = ranked(_costs(grids, runs, size, links), budget)
        costs = ranked([*costs, *level], budget)
        fits = costs and (budget is None or costs[0].peak_bytes <= budget)
        if fits and level and min(one.batch_seconds for one in level) > slower * costs[0].batch_seconds:
            break
    if not costs:
        raise refused[0]
    tried = list[tuple[int, GridCost, CountedRun]]()
    for cost in costs[:TRIES]:
        found = runs[cost.roles]
        if (found.run.sizes["z"], found.run.sizes["data"]) != (cost.sizes[2], cost.copies):
            found = counted((*cost.roles, cost.sizes[2]), cost.copies, layouts[cost.roles])
        tried.append((max(found.step.profile.peak_bytes, found.step.profile.first_bytes), cost, found))
        # of those that are not expected to fit the first needs least
        if budget is None or tried[-1][0] <= budget or cost.peak_bytes > budget:
            break
    fits = budget is None or tried[-1][0] <= budget
    _, cost, found = tried[-1] if fits else min(tried, key=lambda one: one[0])
    steps.spec = technique.on_grid(spec, cost.sizes, layouts[cost.roles], exchanged=cost.exchanged)
    steps.ranks, steps.run_ranks = steps.spec.model_ranks, ranks
    other = {"x": "y", "y": "x"} if cost.exchanged else {}
    steps.sent[:] = [one._replace(axis=other.get(one.axis, one.axis)) for one in found.sent]
    return found.step, tuple(map(Explanation, _notes(cost, costs, budget, n_grids=len(grids))))


def _costs(
    grids: list[tuple[int, int, int, int]], runs: Mapping[Pair, CountedRun], size: int, links: Links
) -> list[GridCost]:
    """Of all grids with so many ranks of x and y, in both deals of roles."""
    return [
        grid_cost(runs[pair].run, z, copies, links, exchanged=exchanged)
        for x, y, z, copies in grids
        for exchanged, pair in ((False, (x, y)), (True, (y, x)))
        if x * y == size and pair in runs
    ]


def _notes(chosen: GridCost, costs: list[GridCost], budget: int | None, *, n_grids: int) -> Iterator[str]:
    """The first grids, each in a line, and why the chosen one won."""
    exchanged = (
        "; its layers split features over y where those of AxoNN do over x" if chosen.exchanged else ""
    )
    if n_grids == 1:
        if exchanged:
            yield f"tensor_grid={chosen.sizes}{exchanged}"
        return
    counted = {cost.sizes for cost in costs}
    fitting = {cost.sizes for cost in costs if budget is None or cost.peak_bytes <= budget}
    within = "" if budget is None else f", {len(fitting)} fit in {format_bytes(budget)}"
    why = "takes least time for a batch" if fitting else "needs least memory"
    yield f"{len(counted)} grids compared{within}: {chosen.sizes} {why}{exchanged}"
    if len(counted) < n_grids:
        most = max(x * y for x, y, _ in counted)
        yield f"{n_grids - len(counted)} grids with x * y > {most} were not compared: {most} take longer than fewer"
    shown, known = 0, set[object]()
    for cost in [chosen, *costs]:
        # two axes of one node may change places, and nothing else changes
        same = {cost.sizes, (cost.roles, cost.sizes[2], cost.seconds)}
        if not same & known and shown < SHOWN:
            shown += 1
            yield (
                f"tensor_grid={cost.sizes}: {format_bytes(cost.peak_bytes)}, sends"
                f" {format_bytes(cost.sent_bytes)}, {format_seconds(cost.batch_seconds)} a batch"
            )
        known |= same
