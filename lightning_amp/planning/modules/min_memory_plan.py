"""Find the plan of a step with the least memory, the largest batch within a budget, and the fewest ranks.

A pipeline's ranks share a batch, where those of a data axis have one each. The leanest has as many stages as divide the
ranks and as there are blocks, and all blocks that can be are computed again; none runs in chunks, which would have to
be recorded for every number of ranks and length of the batch. A plan that was chosen may have some, and then be the
leanest.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.planning.modules.candidates import as_it_is, draft, merit, on_ranks, sets_of_techniques
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.stage_search import StageOptions
from lightning_amp.techniques.table import STRATEGIES, is_of_block, stage_search

LEAST = "the step requires at least "
"""Begins the sentence that says what is missing."""
MOST_RANKS = 1024
"""That are tried where a step does not fit."""


def missing(seen: ProfiledStep, best: Draft, *, budget: int) -> str:
    """For a step that fits with nothing: the least bytes that are known, and what would fit."""
    ranks = best.ranks * best.model
    least = leanest(seen, ranks)
    # what was chosen has been counted as it runs, and is no more than that with the same techniques
    if best.peak_bytes <= least.peak_bytes or best.strategies == least.strategies:
        least = best
    said = f"{LEAST}{spelled(least)} on {on_ranks(ranks)}"
    fixed = seen.chain.all_fixed
    said += f" ({fixed})" if fixed else ""
    more = fewest_ranks(seen, budget, above=ranks)
    if more is None and seen.counted is None:
        # of a profile alone, or of a step that needs values, not all techniques are looked for
        return f"{said}, as far as techniques were looked for"
    if more is None:
        return f"{said}; no number of ranks up to {MOST_RANKS} would be enough: {smaller(seen)}"
    with_what = " and ".join(more.strategies) or "nothing else"
    return f"{said}; {on_ranks(more.ranks * more.model)} with {with_what} would fit"


def smaller(seen: ProfiledStep) -> str:
    """What to do with a step that fits on no number of ranks which have a whole sample each."""
    # the techniques of the search leave a sample whole; those that run the step by themselves split it
    splitting = " or ".join(repr(name) for name, row in STRATEGIES.items() if row.steps)
    split = f"split a sample over several ranks with strategies={splitting}"
    return split if seen.profile.batch_size == 1 else f"use a smaller batch, or {split}"


def leanest(seen: ProfiledStep, ranks: int) -> Draft:
    """The plan that needs the least memory."""
    return min((over_data(seen, ranks), *over_stages(seen, ranks)), key=_leaner)


def over_data(seen: ProfiledStep, ranks: int) -> Draft:
    """That of them in which every rank has a batch."""
    made = [draft(seen, names, ranks=ranks, budget=0) for names in sets_of_techniques()]
    return min((one for one in made if isinstance(one, Draft)), key=_leaner)


def over_stages(seen: ProfiledStep, ranks: int) -> list[Draft]:
    """That in which as many ranks as can be share a batch as stages; none where there can be no pipeline."""
    stages = max((n for n in range(2, _blocks(seen) + 1) if ranks % n == 0), default=0)
    return _staged(seen, stages, data=ranks // stages) if stages else []


def with_techniques_of(plan: Plan, seen: ProfiledStep) -> Draft:
    """That of them with a plan's techniques, on its ranks; a batch of another length may do without some.

    Raises:
        PlanError: The step cannot be run as the plan's stages.
    """
    if not plan.stages:
        sets = (names for names in sets_of_techniques() if {*names} <= {*plan.strategies})
        made = [draft(seen, names, ranks=plan.gradient_ranks, budget=0) for names in sets]
        return min((one for one in made if isinstance(one, Draft)), key=_leaner)
    search = stage_search()
    inside = {rule.strategy for rule in plan.rules if is_of_block(rule)}
    asked = search.named(StageOptions(), inside, budget_named=True)
    found = search.staged(seen, plan.mesh.model, data=plan.mesh.data, budget=0, asked=asked)
    if isinstance(found, str):
        raise PlanError(f"the step cannot run as {plan.mesh.model} stages: {found}")
    return found


def fewest_ranks(seen: ProfiledStep, budget: int, *, above: int = 0) -> Draft | None:
    """The leanest plan for the fewest ranks on which it fits; None where it does on none up to `MOST_RANKS`."""
    found = _fewest_over_data(seen, budget, above)
    # stages of no more ranks than `above` are among what did not fit, and as many as a data axis needs are no gain
    most = _blocks(seen) if found is None else min(_blocks(seen), found.ranks - 1)
    # a stage more takes memory from all others, if little
    for stages in range(max(2, above + 1), most + 1):
        for made in _staged(seen, stages, data=1):
            if made.peak_bytes <= budget:
                return made
    return found


def _fewest_over_data(seen: ProfiledStep, budget: int, above: int) -> Draft | None:
    # from two ranks on peaks do not grow with them: doubled until it fits, then halved; one rank averages nothing, may
    # need less than two, and is tried first
    low, high = above, above + 1
    while over_data(seen, high).peak_bytes > budget:
        if high >= MOST_RANKS:
            return None
        low, high = high, min(2 * high, MOST_RANKS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if over_data(seen, middle).peak_bytes <= budget else (middle, high)
    return over_data(seen, high)


def _staged(seen: ProfiledStep, stages: int, *, data: int) -> list[Draft]:
    """With blocks computed again where any can be."""
    for again in (("*",), ()):
        made = stage_search().staged(seen, stages, data=data, budget=0, asked=StageOptions(again=again, chunks={}))
        if isinstance(made, Draft):
            return [made]
    return []


def _blocks(seen: ProfiledStep) -> int:
    """That can be stages."""
    found = stage_search().blocks(seen)
    return 0 if isinstance(found, str) else found


def _leaner(one: Draft) -> tuple[int, tuple[float, int, int]]:
    return one.peak_bytes, merit(one)


def spelled(one: Draft) -> str:
    """Its peak, and its techniques."""
    with_what = f" with {' and '.join(one.strategies)}" if one.strategies else ""
    return f"{format_bytes(one.peak_bytes)}{with_what}"


MOST_STEPS = 12
"""Steps that are profiled for one answer."""
MOST_BATCH = 2**24

SeenAt = Callable[[int], ProfiledStep]
"""Length of a rank's batch -> its step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest batches that fit; 0 where not even one sample does.

    Attributes:
        plain: Of a rank, with the step as it is.
        lean: With techniques.
        techniques: These.
        sharing: Ranks that share the latter, as the stages of a pipeline.
    """

    plain: int
    lean: int
    techniques: tuple[str, ...]
    sharing: int


def largest_batches(
    seen_at: SeenAt, seen: ProfiledStep, *, ranks: int, budget: int, named: Plan | None
) -> LargestBatch:
    """The largest batches with the step as it is, and with techniques.

    Args:
        seen_at: Counts the step with a batch of another length.
        seen: The step as it was counted, of a batch with a length.
        ranks: Of a data axis, or stages.
        budget: Bytes of a device.
        named: A plan whose techniques are the ones to use, as much of each as is needed; None allows all.

    Raises:
        AmpError: The step cannot be counted with a batch of another length.
    """
    start = seen.profile.batch_size
    assert start is not None, "the batch has a length"

    def with_techniques(n: int) -> Draft:
        step = seen if n == start else seen_at(n)
        return over_data(step, ranks) if named is None else with_techniques_of(named, step)

    def on_stages(n: int) -> Draft:
        return over_stages(seen if n == start else seen_at(n), ranks)[0]

    def plain_peak(n: int) -> int:
        return as_it_is(seen if n == start else seen_at(n), ranks).peak_bytes

    plain = largest_batch(plain_peak, budget, start)
    lean = largest_batch(lambda n: with_techniques(n).peak_bytes, budget, start)
    best = with_techniques(lean or start)
    # as of policy auto, where the batch fits in no other way
    if named is None and lean < start and over_stages(seen, ranks):
        shared, staged = largest_batch(lambda n: on_stages(n).peak_bytes, budget, start), on_stages(start)
        # of a pipeline's ranks one batch
        if shared > lean * staged.model:
            lean, best = shared, staged
    return LargestBatch(plain=plain, lean=lean, techniques=best.strategies, sharing=best.model)


def answers(seen_at: SeenAt, seen: ProfiledStep, *, ranks: int, budget: int, named: Plan | None = None) -> list[str]:
    """Two sentences for a plan on so many ranks: the fewest devices and the largest batch.

    Arguments as of `largest_batches`.
    """
    fewest, length = fewest_ranks(seen, budget), seen.profile.batch_size
    where = "for all of them" if fewest is not None and fewest.model > 1 else "on each"
    each = "" if length is None else f" with a batch of {length:,} {where}"
    found = [f"no number of devices has the memory for this step{each}: {smaller(seen)}"]
    if fewest is not None:
        found = [f"the fewest devices for this step{each}: {fewest.ranks * fewest.model}, {spelled(fewest)}"]
    if length is None:
        return [*found, "the largest batch is not known: the tensors of a batch have no length in common"]
    try:
        most = largest_batches(seen_at, seen, ranks=ranks, budget=budget, named=named)
    except AmpError as error:
        return [*found, f"the largest batch is not known: one of another length cannot be counted: {error}"]
    within = f"the largest batch of a rank that fits {format_bytes(budget)}"
    if not most.plain and not most.lean:
        return [*found, f"{within}: none, not even one of 1"]
    more = ""
    if most.sharing > 1 or most.lean > most.plain:
        more = f", {most.lean:,} with {' and '.join(most.techniques)}"
        more += f", which {on_ranks(most.sharing)} share" if most.sharing > 1 else ""
    return [*found, f"{within} on {on_ranks(ranks)}: {most.plain or 'none'} with the step as it is{more}"]


def largest_batch(peak_of: Callable[[int], int], budget: int, start: int) -> int:
    """The largest length whose peak is within the budget, 0 where that of 1 is not; peaks grow with the length.

    A step's bytes are nearly a straight line over the length: a line through two known points says where to look next.
    After `MOST_STEPS` looks the largest that is known to fit is returned.
    """
    peaks: dict[int, int] = {}
    n, low, high = start, 0, MOST_BATCH
    for _ in range(MOST_STEPS):
        peaks[n] = peak_of(n)
        low, high = (max(low, n), high) if peaks[n] <= budget else (low, min(high, n))
        if high - low <= 1:
            break
        n = _next(peaks, budget, low, high)
    return low


def _next(peaks: dict[int, int], budget: int, low: int, high: int) -> int:
    if len(peaks) == 1:
        guess = 2 * low if low else high // 2
    else:
        # the two whose peaks are nearest to the budget
        (a, p), (b, q) = sorted(peaks.items(), key=lambda item: abs(item[1] - budget))[:2]
        guess = int(a + (budget - p) * (b - a) / (q - p)) if q != p else (low + high) // 2
        # a guess next to a bound that was right is not made again and again from the same side
        guess += 1 if guess == low else 0
    return min(max(guess, low + 1), high - 1)
