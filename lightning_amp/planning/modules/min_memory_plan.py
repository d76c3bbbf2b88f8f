"""Find the plan of a step with the least memory, and the fewest ranks on which a step fits.

Ranks of a pipeline share a batch; ranks of a data axis have one each. The leanest pipeline has the largest number of
stages that divides the ranks and is at most the number of blocks, and it checkpoints every block that can be. None of
its blocks runs in chunks, because chunks would have to be recorded for every number of ranks and batch length. A chosen
plan may have chunks and then require less memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, NoRoomToCountError, PlanError
from lightning_amp.planning.modules.candidates import Known, as_it_is, draft, merit, on_ranks, sets_of_techniques
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.stage_search import StageOptions
from lightning_amp.techniques.table import PREDICTIONS, STRATEGIES, is_of_block, stage_search

LEAST = "the step requires at least "
"""Start of the message that says what is missing."""
OWN_CHECKPOINTS = (
    ", with the checkpoints of its own code; without these (gradient_checkpointing_disable() of transformers) recompute"
    " and chunk may take less"
)
"""Said of a step that a user's code has made lean already."""
NO_ROOM = (
    ", of the plans that were counted: with {} the step, which needs values, has no room to be counted in this budget;"
    " AMPStrategy(on_predicted_oom='warn') counts it"
)
MOST_COUNTS = 6
"""Most plans that are counted to find the one that requires the least memory."""
MOST_RANKS = 1024
"""Largest number of ranks that is tried if a step does not fit."""


def missing(seen: ProfiledStep, best: Draft, *, budget: int) -> str:
    """Return the least bytes found, and what would fit, for a step that fits with no technique."""
    ranks = best.ranks * best.model
    if seen.least is not None:
        least = min((seen.least, *over_stages(seen, ranks)), key=_leaner)
    else:
        least = leanest(seen, ranks)
        # the chosen plan was counted as it runs, and needs no more than the predicted one with the same techniques
        least = best if best.strategies == least.strategies else least
    least = best if best.peak_bytes <= least.peak_bytes else least
    # counted with a technique, a step can need more than as it is
    least = min(least, as_it_is(seen, ranks), key=_leaner)
    said = f"{LEAST}{spelled(least)} on {on_ranks(ranks)}"
    fixed = seen.chain.all_fixed
    said += f" ({fixed})" if fixed else ""
    if seen.no_room:
        sets = " and with ".join("+".join(names) for names in sorted(seen.no_room))
        said += NO_ROOM.format(sets)
    said += OWN_CHECKPOINTS if seen.own_checkpoints else ""
    if least.peak_bytes <= budget:
        return f"{said}, which fits: name these techniques in strategies"
    more = fewest_ranks(seen, budget, above=ranks)
    if more is None and seen.counted is None:
        # for a profile alone, or a step that needs values, some techniques were not searched
        return f"{said}, as far as techniques were looked for"
    if more is None:
        no_number = f"with whole samples no number of ranks up to {MOST_RANKS} would be enough"
        return f"{said}; {no_number}: {smaller(seen, budget)}"
    with_what = " and ".join(more.strategies) or "nothing else"
    return f"{said}; {on_ranks(more.ranks * more.model)} with {with_what} would fit"


def smaller(seen: ProfiledStep, budget: int) -> str:
    """Advise on a step that fits on no number of ranks if each has at least one complete sample."""
    if (held := seen.held_bytes) > budget:
        # no batch is small enough for one rank
        splitting = " or ".join(repr(name) for name, row in STRATEGIES.items() if row.split_parameters)
        several = f", or a smaller batch on several ranks that split them, with strategies={splitting}"
        several = "" if seen.profile.batch_size == 1 else several
        alone = f"parameters, gradients and optimizer state alone take {format_bytes(held)}, whatever the batch"
        return f"{alone}: use a smaller model{several}"
    # searched techniques do not split a sample; strategies that run the step themselves do
    splitting = " or ".join(repr(name) for name, row in STRATEGIES.items() if row.steps)
    split = f"split a sample over several ranks with strategies={splitting}"
    return split if seen.profile.batch_size == 1 else f"use a smaller batch, or {split}"


def leanest(seen: ProfiledStep, ranks: int) -> Draft:
    """Return the plan that requires the least memory."""
    return min((over_data(seen, ranks), *over_stages(seen, ranks)), key=_leaner)


def over_data(seen: ProfiledStep, ranks: int, *, splitting: bool = False) -> Draft:
    """Return the leanest plan in which every rank has its own batch; if `splitting`, of those that split over ranks."""
    known = Known()
    sets = (names for names in sets_of_techniques() if not splitting or any(map(_splits, names)))
    made = (draft(seen, names, ranks=ranks, budget=0, known=known) for names in sets)
    return min((one for one in made if isinstance(one, Draft)), key=_leaner, default=as_it_is(seen, ranks))


def _splits(name: str) -> bool:
    """Whether more ranks need less with a technique."""
    return bool(STRATEGIES[name].split_parameters) or PREDICTIONS[name].needs_ranks > 1


def leanest_counted(
    seen: ProfiledStep, ranks: int, known: Mapping[tuple[Rule, ...], int], count: Callable[[Draft], int]
) -> tuple[Draft, ProfiledStep]:
    """Return the plan over data with the least counted peak, and the step with the peaks of all counted sets.

    Sets are counted by ascending prediction, until no other is predicted to need less than the least count, and at most
    `MOST_COUNTS` of them, each with all of its techniques and with what saves most by the prediction. What a count
    takes beyond the prediction is added to the predictions of all sets with the same techniques. Sets with techniques
    that the user requests follow, as many again: a request of more techniques never requires more.

    Args:
        seen: The step, without what counts found beyond predictions.
        ranks: Ranks of the data axis.
        known: Peaks that were counted already, by rules.
        count: Counts a plan; raises an AmpError if its techniques refuse the module.
    """
    drafted = Known()
    made = [
        (names, draft(seen, names, ranks=ranks, budget=n, known=drafted))
        for names in sets_of_techniques()
        for n in (0, None)
    ]
    drafts = [(frozenset(names), one) for names, one in made if isinstance(one, Draft)]
    with_requested = [pair for pair in drafts if pair[0] & seen.requested.keys()]
    others = [pair for pair in drafts if not pair[0] & seen.requested.keys()]
    best, counts = as_it_is(seen, ranks), dict(seen.counts)
    excess: dict[frozenset[str], int] = {}

    def expected(pair: tuple[frozenset[str], Draft]) -> tuple[int, tuple[float, int, int]]:
        more = max((n for names, n in excess.items() if names <= pair[0]), default=0)
        return pair[1].peak_bytes + more, merit(pair[1])

    def counted(one: Draft) -> int | None:
        nonlocal seen
        try:
            return count(one)
        except NoRoomToCountError:
            seen = replace(seen, no_room=seen.no_room | {one.strategies})
        except AmpError:
            pass
        return None

    for left in (others, with_requested):
        n_counts = 0
        while left and n_counts < MOST_COUNTS and expected(found := min(left, key=expected))[0] < best.peak_bytes:
            left.remove(found)
            names, one = found
            peak = known.get(one.targets)
            if peak is None:
                n_counts, peak = n_counts + 1, counted(one)
            if peak is None:
                continue
            excess[names] = max(peak - one.peak_bytes, excess.get(names, 0))
            counts[names] = min(peak, counts.get(names, peak))
            best = min(best, replace(one, peak_bytes=peak), key=_leaner)
    return best, replace(seen, counts=counts, least=best)


def over_stages(seen: ProfiledStep, ranks: int) -> list[Draft]:
    """Return the leanest plan with as many stages as possible; empty if no pipeline is possible."""
    stages = max((n for n in range(2, _blocks(seen) + 1) if ranks % n == 0), default=0)
    return _staged(seen, stages, data=ranks // stages) if stages else []


def with_techniques_of(plan: Plan, seen: ProfiledStep) -> Draft:
    """Return the leanest draft with techniques of a plan, on its ranks; for another batch length, some may not help.

    Raises:
        PlanError: The step cannot be run as the plan's stages.
    """
    if not plan.stages:
        sets = (names for names in sets_of_techniques() if {*names} <= {*plan.strategies})
        made = [draft(seen, names, ranks=plan.gradient_ranks, budget=0) for names in sets]
        return min((one for one in made if isinstance(one, Draft)), key=_leaner)
    search = stage_search()
    inside = {rule.strategy for rule in plan.rules if is_of_block(rule)}
    options = search.named(StageOptions(), inside, budget_named=True)
    found = search.staged(seen, plan.mesh.model, data=plan.mesh.data, budget=0, options=options)
    if isinstance(found, str):
        raise PlanError(f"the step cannot run as {plan.mesh.model} stages: {found}")
    return found


def fewest_ranks(seen: ProfiledStep, budget: int, *, above: int = 0) -> Draft | None:
    """Return the leanest plan on the fewest ranks that fit; None if none fits up to `MOST_RANKS`."""
    found = _fewest_over_data(seen, budget, above)
    # pipelines of up to `above` ranks did not fit, and one with as many ranks as the data axis is no gain
    most = _blocks(seen) if found is None else min(_blocks(seen), found.ranks - 1)
    for stages in range(max(2, above + 1), most + 1):
        for made in _staged(seen, stages, data=1):
            if made.peak_bytes <= budget:
                return made
    return found


def _fewest_over_data(seen: ProfiledStep, budget: int, above: int) -> Draft | None:
    def fits(ranks: int) -> bool:
        return over_data(seen, ranks, splitting=True).peak_bytes <= budget

    # one rank averages no gradients, so that without a split it requires the least
    if above < 1 and (alone := over_data(seen, 1)).peak_bytes <= budget:
        return alone
    low, high = max(1, above), MOST_RANKS
    # peaks do not grow with the ranks
    if low >= high or not fits(high):
        return None
    while high > low + 1:
        # double first, for most need few ranks
        middle = min(2 * low, (low + high) // 2)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return over_data(seen, high, splitting=True)


def _staged(seen: ProfiledStep, stages: int, *, data: int) -> list[Draft]:
    """Draft stages with checkpointed blocks, else without; empty if neither is possible."""
    for again in (("*",), ()):
        made = stage_search().staged(seen, stages, data=data, budget=0, options=StageOptions(again=again))
        if isinstance(made, Draft):
            return [made]
    return []


def _blocks(seen: ProfiledStep) -> int:
    """Return the number of blocks that can be stages."""
    found = stage_search().blocks(seen)
    return 0 if isinstance(found, str) else found


def _leaner(one: Draft) -> tuple[int, tuple[float, int, int]]:
    return one.peak_bytes, merit(one)


def spelled(one: Draft) -> str:
    """Format the peak and the techniques of a draft."""
    return spelled_peak(one.peak_bytes, one.strategies)


def spelled_peak(peak: int, techniques: Sequence[str]) -> str:
    """Format a peak and techniques."""
    return format_bytes(peak) + (f" with {' and '.join(techniques)}" if techniques else "")
