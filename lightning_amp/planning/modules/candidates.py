"""Enumerate technique sets of a module's step, and pick the fastest that fits.

    1. every set of techniques, each added in the order of the table with as much of it as the budget asks for
    2. without the sets in which one of them cannot be added
    3. without those whose predicted peak, with what a count has found beyond it, exceeds the budget
    4. the least predicted time; within `TIE` of it the fewest techniques, then the least memory

A pipeline (techniques/stage_search.py) goes with none of them but blocks that are computed again or run in chunks,
which it chooses by itself, chunks where nothing else fits. It is compared too, by its time for as many samples, and
taken where nothing without a model axis fits: its ranks share a batch, so a step has fewer samples, and what a step
does besides its blocks may turn out to be refused when it runs.

If none fits, the one that needs the least memory is taken, and the plan says that it does not fit.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from types import MappingProxyType

from lightning_amp.costs.device_rates import collective_seconds
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.footprint.module_profile import KINDS
from lightning_amp.planning.plan.plan import NEEDLESS, Candidate
from lightning_amp.planning.policies.auto import TIE
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.stage_search import OPEN, StageOptions
from lightning_amp.techniques.table import PREDICTIONS, STAGED, in_order, stage_search
from lightning_amp.techniques.technique import Prediction

WORTH = 0.05
"""Of the peak: a technique helps that takes as much away."""
TRIES = 4
"""Times that a plan is counted above the budget before there is as much of its techniques as can be."""
MOSTLY = 0.6
"""Of the peak: what stands in the way of a technique that leaves as much as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The plan that was chosen, the first of `candidates`; sets of techniques that cannot be, with why."""

    best: Draft
    candidates: tuple[Candidate, ...]
    dropped: dict[tuple[str, ...], str]


def as_it_is(seen: ProfiledStep, ranks: int) -> Draft:
    """The step without any technique, its gradients averaged over the ranks."""
    gradients, averaging = seen.profile.by_kind["gradients"], ranks if seen.averages else 1
    sent = collective_seconds("all_reduce", gradients, averaging, seen.rates.links)
    return Draft(
        ranks=ranks,
        peak_bytes=seen.peak_bytes(ranks),
        relief_bytes=-seen.agreed_bytes(ranks),
        floor_bytes=seen.averaging_bytes(ranks),
        seconds=seen.seconds + sent,
    )


def compare(
    seen: ProfiledStep,
    *,
    ranks: int,
    budget: int | None,
    base: tuple[str, ...] = (),
    batch_size: int = 1,
    refused: Mapping[tuple[str, ...], str] = MappingProxyType({}),
    asked: StageOptions = OPEN,
) -> Compared:
    """Draft every plan, and choose.

    Args:
        seen: The step.
        ranks: Of the data axis.
        budget: Bytes of one device, None when unknown.
        base: Strategies that every plan has.
        batch_size: Of one rank, for the time of a sample.
        refused: Sets that the module was found to refuse, and why; no set with one of them is drafted.
        asked: Of a pipeline.
    """
    found, dropped = list[Draft](), dict(refused)
    for names in sets_of_techniques():
        if any(set(names) >= set(one) for one in refused) or _is_needless(seen, names, ranks=ranks, budget=budget):
            continue
        made = draft(seen, names, ranks=ranks, budget=budget)
        if isinstance(made, str):
            dropped[names] = made
        else:
            found.append(made)
    if (STAGED,) not in refused and not _stages_are_needless(seen, ranks=ranks, budget=budget):
        # stages are taken where nothing else fits: where something does, blocks of them in chunks are not looked for,
        # which takes seconds
        if any(budget is None or one.peak_bytes <= budget for one in found):
            asked = replace(asked, chunks={})
        made = stage_search().best(seen, ranks=ranks, budget=budget, asked=asked)
        if isinstance(made, str):
            dropped[STAGED,] = f"{STAGED} is not possible: {made}"
        else:
            found.append(made)
    best = _chosen(found, budget)
    rows = sorted(found, key=lambda one: (one is not best, budget is not None and one.peak_bytes > budget, *merit(one)))
    return Compared(
        best=best,
        candidates=tuple(_candidate(one, best, budget, base=base, batch_size=batch_size) for one in rows),
        dropped=dropped,
    )


def draft(seen: ProfiledStep, names: Collection[str], *, ranks: int, budget: int | None) -> Draft | str:
    """The plan with these techniques, or why one of them cannot be added; of a technique's variants the fastest that
    fits, and with None that which saves most. What counts have found beyond the prediction is part of the peak.
    """
    found = seen.beyond.get(frozenset(names), ())
    if budget is not None and found:
        # by as much as counts have exceeded the prediction, less is allowed; at last all that can be is done
        budget = 0 if len(found) >= TRIES - 1 else max(0, budget - sum(found))
    ways = [seen]
    for name in names:
        if variants := PREDICTIONS[name].variants:
            ways = [one for way in ways for one in variants(way, ranks)]
    # each way is drafted with all techniques: that which is cheapest alone may leave the others too little room
    made = [_draft(way, names, ranks=ranks, budget=budget) for way in ways]
    drafts = [one for one in made if isinstance(one, Draft)]
    if not drafts:
        return made[0]
    # nothing fits in 0 bytes, of which the least is taken
    best = _chosen(drafts, 0 if budget is None else budget)
    return replace(best, peak_bytes=best.peak_bytes + sum(found))


def _draft(seen: ProfiledStep, names: Collection[str], *, ranks: int, budget: int | None) -> Draft | str:
    made: Draft | str = as_it_is(seen, ranks)
    for name in names:
        assert isinstance(made, Draft), "the loop ends where it is none"
        if ranks < PREDICTIONS[name].fewest:
            return f"{name} needs {PREDICTIONS[name].fewest} ranks of the data axis, and there is {ranks}"
        if name in seen.refused:
            return f"{name} is not possible: {seen.refused[name]}"
        made = PREDICTIONS[name].add(seen, made, budget)
        if isinstance(made, str):
            return f"{name} is not possible: {made}"
    return made


def advice(
    seen: ProfiledStep, *, ranks: int, budget: int | None = None, stages: Draft | None = None, compared: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """What each technique by itself would make of the peak, or why it would not help; those that help most first.

    Of `stages` that are drafted already it gets what they make; those of others are looked for beyond a budget only,
    or where they may be faster and plans are `compared`.
    """
    helps: dict[str, tuple[int, str]] = {}
    does_not: dict[str, str] = {}

    def judge(name: str, whole: Draft, made: Draft | str, why_not: Callable[[Draft], str]) -> None:
        if isinstance(made, str):
            does_not[name] = f"{name} would not: {made}"
        elif made.peak_bytes <= (1 - WORTH) * whole.peak_bytes:
            helps[name] = made.peak_bytes, _gain(name, whole, made)
        else:
            does_not[name] = f"{name} would not: {why_not(made)}"

    for name, technique in PREDICTIONS.items():
        if _is_needless(seen, (name,), ranks=ranks, budget=budget):
            does_not[name] = NEEDLESS.format(name)
            continue
        n = max(ranks, technique.fewest)
        whole, made = as_it_is(seen, n), draft(seen, (name,), ranks=n, budget=None)
        made = made.partition(": ")[2] or made if isinstance(made, str) else made
        judge(name, whole, made, partial(_why_not, seen, technique, whole))
    if ranks > 1 and stages is None and _stages_are_needless(seen, ranks=ranks, budget=budget, faster=compared):
        does_not[STAGED] = NEEDLESS.format(STAGED)
    elif ranks > 1:
        search, whole = stage_search(), as_it_is(seen, ranks)
        made = stages or search.best(seen, ranks=ranks, budget=None, asked=OPEN)
        judge(STAGED, whole, made, lambda made: f"{_instead(whole, made)}, for {search.limit}")
    ordered = sorted(helps, key=lambda name: helps[name][0])
    return {name: helps[name][1] for name in ordered}, does_not


def _is_needless(seen: ProfiledStep, names: Collection[str], *, ranks: int, budget: int | None) -> bool:
    """Whether a set has something that takes seconds to look for, and the step fits as it is, which is faster."""
    known = any(getattr(fact, "known", False) for fact in seen.facts.values())
    return not known and any(PREDICTIONS[name].slow for name in names) and _fits(seen, ranks=ranks, budget=budget)


def _stages_are_needless(seen: ProfiledStep, *, ranks: int, budget: int | None, faster: bool = True) -> bool:
    """Likewise of stages, of which it is known that they can be: a step of fewer samples would be counted for them.

    What stages save in time, if it matters that they may be `faster`, is the bytes of gradients that are averaged;
    their messages are not fewer.
    """
    links = replace(seen.rates.links, latency=0.0)
    saved = collective_seconds("all_reduce", seen.profile.by_kind["gradients"], ranks, links)
    needless = (saved <= WORTH * seen.seconds or not faster) and _fits(seen, ranks=ranks, budget=budget)
    return needless and not isinstance(stage_search().blocks(seen), str)


def _fits(seen: ProfiledStep, *, ranks: int, budget: int | None) -> bool:
    """Whether the step is known to fit as it is."""
    return budget is not None and as_it_is(seen, ranks).peak_bytes <= budget


def _instead(whole: Draft, made: Draft) -> str:
    return f"the peak would be {format_bytes(made.peak_bytes)} instead of {format_bytes(whole.peak_bytes)}"


def _why_not(seen: ProfiledStep, technique: Prediction, whole: Draft, made: Draft) -> str:
    """What is most of the peak and stays, or what else stands in the way."""
    left = [kind for kind in KINDS if kind not in technique.kinds]
    share = sum(seen.profile.by_kind[kind] for kind in left) / seen.profile.peak_bytes
    if share >= MOSTLY:
        *first, last = sorted(left, key=seen.profile.by_kind.__getitem__, reverse=True)
        most = f"{', '.join(first)} and {last}" if first else last
        return f"{100 * share:.0f} % of the peak are {most}, which it leaves as they are"
    return f"{_instead(whole, made)}, for {technique.limit}"


def sets_of_techniques() -> Iterator[tuple[str, ...]]:
    """Every set of techniques, the empty one first."""
    return chain.from_iterable(combinations(PREDICTIONS, n) for n in range(len(PREDICTIONS) + 1))


def _chosen(found: list[Draft], limit: int | None) -> Draft:
    fitting = [one for one in found if limit is None or one.peak_bytes <= limit]
    if not fitting:
        return min(found, key=lambda one: (one.peak_bytes, *merit(one)))
    # stages share a batch, so that a step has fewer samples: only where nothing else fits
    fitting = [one for one in fitting if one.model == 1] or fitting
    least = min(one.seconds for one in fitting)
    level = [one for one in fitting if one.seconds <= TIE * least]
    return min(level, key=lambda one: (len(one.strategies), one.peak_bytes))


def merit(one: Draft) -> tuple[float, int, int]:
    """Of two plans the better one has less of it."""
    return one.pace, len(one.strategies), one.peak_bytes


def _candidate(one: Draft, best: Draft, budget: int | None, *, base: tuple[str, ...], batch_size: int) -> Candidate:
    if one is best:
        verdict = "chosen"
    elif budget is not None and one.peak_bytes > budget:
        verdict = f"exceeds {format_bytes(budget + one.more_bytes)}"
    elif (ratio := one.pace / best.pace) < 1 / TIE:  # over the model axis, which is a last resort
        verdict = f"{1 / ratio:.2f} x as fast"
    else:
        verdict = f"within {100 * (TIE - 1):.0f} %, no simpler" if ratio < TIE else f"{ratio:.2f} x the time"
    return Candidate(
        strategies=in_order({*base, *one.strategies}),
        data=one.ranks,
        model=one.model,
        peak_bytes=one.peak_bytes + one.more_bytes,
        step_seconds=one.seconds,
        cell_seconds=one.seconds / (one.ranks * batch_size),
        verdict=verdict,
    )


def _gain(name: str, whole: Draft, made: Draft) -> str:
    less = 100 * (1 - made.peak_bytes / whole.peak_bytes)
    slower = 100 * (made.pace / whole.pace - 1)
    ranks = made.ranks * made.model
    at = f" on {on_ranks(ranks)}" if ranks > 1 else ""
    return (
        f"{name} would make the peak {format_bytes(made.peak_bytes)} instead of"
        f" {format_bytes(whole.peak_bytes)}{at} ({less:.0f} % less), for about {max(0.0, slower):.0f} % more time"
    )


def on_ranks(ranks: int) -> str:
    """As "2 ranks"."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
