"""Find the plan of a step with the least memory, the largest batch within a budget, and the fewest ranks that fit.

Ranks of a pipeline share a batch; ranks of a data axis have one each. The leanest pipeline has the largest number of
stages that divides the ranks and is at most the number of blocks, and it checkpoints every block that can be. None of
its blocks runs in chunks, because chunks would have to be recorded for every number of ranks and batch length. A chosen
plan may have chunks and then require less memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.planning.modules.candidates import as_it_is, draft, merit, on_ranks, sets_of_techniques
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.stage_search import StageOptions
from lightning_amp.techniques.table import STRATEGIES, is_of_block, stage_search

LEAST = "the step requires at least "
"""Start of the message that says what is missing."""
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
    more = fewest_ranks(seen, budget, above=ranks)
    if more is None and seen.counted is None:
        # for a profile alone, or a step that needs values, some techniques were not searched
        return f"{said}, as far as techniques were looked for"
    if more is None:
        return f"{said}; no number of ranks up to {MOST_RANKS} would be enough: {smaller(seen, budget)}"
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


def over_data(seen: ProfiledStep, ranks: int) -> Draft:
    """Return the leanest plan in which every rank has its own batch."""
    made = [draft(seen, names, ranks=ranks, budget=0) for names in sets_of_techniques()]
    return min((one for one in made if isinstance(one, Draft)), key=_leaner)


def leanest_counted(
    seen: ProfiledStep, ranks: int, known: Mapping[tuple[Rule, ...], int], count: Callable[[Draft], int]
) -> tuple[Draft, ProfiledStep]:
    """Return the plan over data with the least counted peak, and the step with the peaks of all counted sets.

    Sets are counted by ascending prediction, until no other is predicted to need less than the least count, and at most
    `MOST_COUNTS` of them, each with all of its techniques and with what saves most by the prediction. What a count
    takes beyond the prediction is added to the predictions of all sets with the same techniques.

    Args:
        seen: The step, without what counts found beyond predictions.
        ranks: Ranks of the data axis.
        known: Peaks that were counted already, by rules.
        count: Counts a plan; raises an AmpError if its techniques refuse the module.
    """
    made = [(names, draft(seen, names, ranks=ranks, budget=n)) for names in sets_of_techniques() for n in (0, None)]
    drafts = [(frozenset(names), one) for names, one in made if isinstance(one, Draft)]
    best, counts, left = as_it_is(seen, ranks), dict(seen.counts), MOST_COUNTS
    excess: dict[frozenset[str], int] = {}

    def expected(pair: tuple[frozenset[str], Draft]) -> tuple[int, tuple[float, int, int]]:
        more = max((n for names, n in excess.items() if names <= pair[0]), default=0)
        return pair[1].peak_bytes + more, merit(pair[1])

    while drafts and left:
        found = min(drafts, key=expected)
        if expected(found)[0] >= best.peak_bytes:
            break
        drafts.remove(found)
        names, one = found
        peak = known.get(one.targets)
        if peak is None:
            left -= 1
            try:
                peak = count(one)
            except AmpError:
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
    # each further stage reduces the memory of the others, if only a little
    for stages in range(max(2, above + 1), most + 1):
        for made in _staged(seen, stages, data=1):
            if made.peak_bytes <= budget:
                return made
    return found


def _fewest_over_data(seen: ProfiledStep, budget: int, above: int) -> Draft | None:
    # from two ranks on, peaks do not grow with the ranks, so double and then bisect; one rank averages no gradients and
    # may require less than two, so it is tried first
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
    """Draft stages with checkpointed blocks, else without; empty if neither is possible."""
    for again in (("*",), ()):
        made = stage_search().staged(seen, stages, data=data, budget=0, options=StageOptions(again=again, chunks={}))
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
    return _spelled(one.peak_bytes, one.strategies)


def _spelled(peak: int, techniques: Sequence[str]) -> str:
    return format_bytes(peak) + (f" with {' and '.join(techniques)}" if techniques else "")


MOST_STEPS = 12
"""Number of steps that are profiled for one answer."""
MOST_BATCH = 2**24

SeenAt = Callable[[int], ProfiledStep]
"""Function that maps the batch length of a rank to its step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """Largest batches that fit; 0 if not even one sample does.

    Attributes:
        plain: Samples per rank without techniques.
        lean: Samples with techniques, per rank or per `sharing` ranks.
        techniques: Techniques of `lean`.
        sharing: Ranks that share the batch of `lean`, as stages of a pipeline.
    """

    plain: int
    lean: int
    techniques: tuple[str, ...]
    sharing: int


def largest_batches(
    seen_at: SeenAt, seen: ProfiledStep, *, ranks: int, budget: int, named: Plan | None, planned: Plan | None = None
) -> LargestBatch:
    """Find the largest batches without techniques, and with techniques.

    Args:
        seen_at: Counts the step for another batch length.
        seen: The counted step, of a batch with a known length.
        ranks: Ranks of a data axis, or stages.
        budget: Bytes of a device.
        named: A plan whose techniques are the only ones to use; None allows all techniques.
        planned: The plan of `seen`, which was counted with its techniques: it may fit where a prediction does not.

    Raises:
        AmpError: The step cannot be counted with another batch length.
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
    # as in policy auto: stages only for a batch that fits in no other way
    if named is None and lean < start and over_stages(seen, ranks):
        shared, staged = largest_batch(lambda n: on_stages(n).peak_bytes, budget, start), on_stages(start)
        # the ranks of a pipeline share one batch
        if shared > lean * staged.model:
            lean, best = shared, staged
    if planned is not None and planned.fits and lean < start:
        return LargestBatch(plain=plain, lean=start, techniques=planned.strategies, sharing=planned.mesh.model)
    return LargestBatch(plain=plain, lean=lean, techniques=best.strategies, sharing=best.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The fewest devices and the largest batch within a budget.

    Attributes:
        fewest: Devices, techniques and peak of the plan on the fewest; None if none fits.
        largest: The largest batches; None if they are not known.
        said: Both in words.
    """

    fewest: tuple[int, tuple[str, ...], int] | None
    largest: LargestBatch | None
    said: tuple[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the words."""
        devices = batch = None
        if self.fewest is not None:
            n, techniques, peak = self.fewest
            devices = {"devices": n, "techniques": list(techniques), "peak_bytes": peak}
        if (most := self.largest) is not None:
            more = most.lean > most.plain
            batch = {
                "samples": max(most.plain, most.lean),
                "techniques": list(most.techniques) if more else [],
                "ranks_that_share_it": most.sharing if more else 1,
                "samples_without_techniques": most.plain,
            }
        parts = {"fewest_devices": devices, "largest_batch": batch}
        return {
            name: None if part is None else part | {"said": said}
            for (name, part), said in zip(parts.items(), self.said, strict=True)
        }


def answers(
    seen_at: SeenAt,
    seen: ProfiledStep,
    *,
    ranks: int,
    budget: int,
    named: Plan | None = None,
    planned: Plan | None = None,
    on_fewest: Callable[[], Plan | None] = lambda: None,
) -> Answers:
    """Find the fewest devices and the largest batch; arguments as in `largest_batches`.

    `on_fewest` returns a counted plan on the fewest devices, or None; it is called where none is predicted to fit.
    """
    draft, length = fewest_ranks(seen, budget), seen.profile.batch_size
    where = "for all of them" if draft is not None and draft.model > 1 else "on each"
    each = "" if length is None else f" with a batch of {length:,} {where}"
    devices, fewest = f"no number of devices has the memory for this step{each}: {smaller(seen, budget)}", None
    if draft is None and (counted := on_fewest()) is not None:
        fewest = counted.mesh.ranks, counted.strategies, counted.predicted_peak_bytes
    if draft is not None:
        fewest = draft.ranks * draft.model, draft.strategies, draft.peak_bytes
    if fewest is not None:
        n, techniques, peak = fewest
        devices = f"the fewest devices for this step{each}: {n}, {_spelled(peak, techniques)}"
    most, why = None, "the tensors of a batch have no length in common"
    if length is not None:
        try:
            most = largest_batches(seen_at, seen, ranks=ranks, budget=budget, named=named, planned=planned)
        except AmpError as error:
            why = f"one of another length cannot be counted: {error}"
    if most is None:
        batch = f"the largest batch is not known: {why}"
    else:
        batch = f"the largest batch of a rank that fits {format_bytes(budget)}{_spelled_batch(most, ranks)}"
    return Answers(fewest=fewest, largest=most, said=(devices, batch))


def _spelled_batch(most: LargestBatch, ranks: int) -> str:
    if not most.plain and not most.lean:
        return ": none, not even one of 1"
    more = ""
    if most.sharing > 1 or most.lean > most.plain:
        more = f", {most.lean:,} with {' and '.join(most.techniques)}"
        more += f", which {on_ranks(most.sharing)} share" if most.sharing > 1 else ""
    return f" on {on_ranks(ranks)}: {most.plain or 'none'} with the step as it is{more}"


def largest_batch(peak_of: Callable[[int], int], budget: int, start: int) -> int:
    """Find the largest length whose peak is within the budget, 0 if length 1 exceeds it; peaks grow with length.

    The bytes of a step are nearly linear in the length: a line through two known points gives the next length to try.
    After `MOST_STEPS` tries, the largest length that is known to fit is returned.
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
        # the two points whose peaks are nearest to the budget
        (a, p), (b, q) = sorted(peaks.items(), key=lambda item: abs(item[1] - budget))[:2]
        guess = int(a + (budget - p) * (b - a) / (q - p)) if q != p else (low + high) // 2
        # avoid repeated guesses next to the same bound
        guess += 1 if guess == low else 0
    return min(max(guess, low + 1), high - 1)
