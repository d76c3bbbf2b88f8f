"""Draft a plan for every set of techniques for a module's step, and choose the fastest that fits.

    1. draft every set of techniques, added in the order of the table, each with as much of it as the budget requires;
       combinations with a technique of the last resort only if no plan that fits is as fast as they could be
    2. drop the sets in which a technique cannot be added
    3. drop those whose predicted peak, plus what counts found beyond the prediction, exceeds the budget
    4. take the least predicted time; within a factor of `TIE` the fewest techniques, then the least memory

A pipeline (techniques/stage_search.py) can be combined only with checkpointed blocks, which it chooses by itself. It is
compared by its time per sample, and chosen only if nothing without a model axis fits, for two reasons: its ranks share
a batch, so a step has fewer samples; and code of the step outside its blocks may turn out to be unsupported when it
runs.

If no plan fits, the one that requires the least memory is taken, and the plan says that it does not fit.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, combinations
from math import inf
from types import MappingProxyType
from typing import Any

from lightning_amp.costs.device_rates import collective_seconds
from lightning_amp.costs.profiled_step import TIE, Draft, ProfiledStep
from lightning_amp.footprint.module_profile import KINDS
from lightning_amp.on_demand import computed_in
from lightning_amp.planning.plan.plan import NEEDLESS, Candidate
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.stage_search import OPEN, StageOptions
from lightning_amp.techniques.table import PREDICTIONS, STAGED, in_order, stage_search
from lightning_amp.techniques.technique import Prediction, result_or_reason

WORTH = 0.05
"""Share of the peak that a technique must save to count as helpful."""
DEAR = 3.0
"""Ratio of step times from which techniques are listed after those that take less time."""
TRIES = 4
"""Number of tries if counts exceed the budget; the last one applies techniques as much as possible."""
MOSTLY = 0.6
"""Share of the peak in kinds of tensors that a technique does not reduce, from which they are given as the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The chosen plan, which is the first of `candidates`, and impossible sets of techniques with the reason."""

    best: Draft
    candidates: tuple[Candidate, ...]
    dropped: dict[tuple[str, ...], str]


def as_it_is(seen: ProfiledStep, ranks: int) -> Draft:
    """Draft the step without any technique; its gradients are averaged over the ranks."""
    gradients, averaging = seen.profile.by_kind["gradients"], ranks if seen.averages else 1
    sent = collective_seconds("all_reduce", gradients, averaging, seen.rates.links)
    return Draft(
        ranks=ranks,
        peak_bytes=seen.peak_bytes(ranks),
        below_one_device_bytes=-seen.agreed_bytes(ranks),
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
    options: StageOptions = OPEN,
) -> Compared:
    """Draft every plan, and choose one.

    Args:
        seen: The profiled step.
        ranks: Ranks of the data axis.
        budget: Bytes of one device, None if unknown.
        base: Strategies that every plan has.
        batch_size: Samples per rank, for the time of a sample.
        refused: Sets that the module does not support -> reason; no superset of one of them is drafted.
        options: Options of a pipeline.
    """
    found, dropped, known = list[Draft](), dict(refused), Known()
    plain = as_it_is(seen, ranks).seconds

    def fits(within: float = inf) -> bool:
        return any((budget is None or one.peak_bytes <= budget) and one.seconds <= within for one in found)

    needless = _needless(seen, ranks=ranks, budget=budget)
    for names in sorted(sets_of_techniques(without=needless), key=_is_last_resort):
        if any(set(names) >= set(one) for one in refused):
            continue
        if _is_last_resort(names) and fits(within=TIE * _least_seconds(names, plain, found)):
            continue
        made = draft(seen, names, ranks=ranks, budget=budget, known=known)
        if isinstance(made, str):
            dropped[names] = made
        else:
            found.append(made)
    staged = ranks > 1 and (STAGED,) not in refused
    if staged and not _stages_are_needless(seen, ranks=ranks, budget=budget):
        made = result_or_reason(stage_search().best, seen, ranks=ranks, budget=budget, options=options)
        if isinstance(made, str):
            dropped[STAGED,] = f"{STAGED} is not possible: {made}"
        else:
            found.append(made)
    if not fits():
        made_last = (
            draft(seen, names, ranks=ranks, budget=budget, known=known, last=True)
            for names in sets_of_techniques()
            if any(PREDICTIONS[name].last_variants for name in names)
            and not any(set(names) >= set(one) for one in refused)
        )
        leaner = {one.strategies: one for one in made_last if isinstance(one, Draft)}
        found = [*(one for one in found if one.strategies not in leaner), *leaner.values()]
    best = _chosen(found, budget)
    rows = sorted(found, key=lambda one: (one is not best, budget is not None and one.peak_bytes > budget, *merit(one)))
    return Compared(
        best=best,
        candidates=tuple(_candidate(one, best, budget, base=base, batch_size=batch_size) for one in rows),
        dropped=dropped,
    )


Known = dict[tuple[Any, ...], Draft | str]
"""Drafts by their variant, techniques and budget: a set has those of a smaller set, and one more."""


def draft(
    seen: ProfiledStep,
    names: Sequence[str],
    *,
    ranks: int,
    budget: int | None,
    known: Known | None = None,
    last: bool = False,
) -> Draft | str:
    """Draft the plan with these techniques, or return why one of them cannot be added.

    Of a technique's variants the fastest that fits is taken; without a budget the one that saves most. The peak
    includes what counts found beyond the prediction.

    Args:
        known: Drafts of the same step and ranks, which are not made again.
        last: Whether to take the variants that are compared last.
    """
    found = seen.beyond.get(frozenset(names), ())
    if budget is not None and found:
        # the budget is reduced by what counts found beyond the prediction; in the last try techniques save all they can
        budget = 0 if len(found) >= TRIES - 1 else max(0, budget - sum(found))
    ways = [seen]
    for name in names:
        row = PREDICTIONS[name]
        if variants := (row.last_variants if last else None) or row.variants:
            ways = [one for way in ways for one in variants(way, ranks)]
    if not ways:
        return f"{' and '.join(names)} have no further way"
    # each variant is drafted with all techniques: the cheapest variant alone may leave too little room for the others
    known = Known() if known is None else known
    made = [
        _draft(way, (last, k), _treated(way, seen, names), tuple(names), ranks=ranks, budget=budget, known=known)
        for k, way in enumerate(ways)
    ]
    drafts = [one for one in made if isinstance(one, Draft)]
    if not drafts:
        return made[0]
    # a budget of 0 fits nothing, so that the least memory is chosen
    best = _chosen(drafts, 0 if budget is None else budget)
    return replace(best, peak_bytes=best.peak_bytes + sum(found))


def _treated(way: ProfiledStep, seen: ProfiledStep, names: Sequence[str]) -> Set[str]:
    """Return which of these techniques a variant of a step treats otherwise; all if it changes more than facts."""
    same = all(getattr(way, one.name) is getattr(seen, one.name) for one in fields(way) if one.name != "facts")
    return {name for name in names if not same or way.facts.get(name) is not seen.facts.get(name)}


def _draft(
    seen: ProfiledStep,
    variant: tuple[bool, int],
    treated: Set[str],
    names: tuple[str, ...],
    *,
    ranks: int,
    budget: int | None,
    known: Known,
) -> Draft | str:
    # before any of them is added, which may take a search
    for name in names:
        needed = getattr(seen.requested.get(name), "needs_ranks", PREDICTIONS[name].needs_ranks)
        if ranks < needed:
            return f"{name} needs {needed} ranks of the data axis, and there is {ranks}"
        if name in seen.refused:
            return f"{name} is not possible: {seen.refused[name]}"
    made: Draft | str = as_it_is(seen, ranks)
    # sets have the same variants if the same techniques of them have some
    of_variant = variant, tuple(name for name in names if PREDICTIONS[name].variants)
    for n, name in enumerate(names, 1):
        assert isinstance(made, Draft), "the loop ends where it is none"
        key = (of_variant if treated & {*names[:n]} else None, names[:n], budget)
        if key not in known:
            known[key] = result_or_reason(PREDICTIONS[name].add, seen, made, budget)
        made = known[key]
        if isinstance(made, str):
            return f"{name} is not possible: {made}"
    return made


def advice(
    seen: ProfiledStep, *, ranks: int, budget: int | None = None, stages: Draft | None = None, compared: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the effect of each technique on the peak, and why others would not help; the most helpful come first.

    `stages` is a draft that exists already. Without it, stages are searched only if the step exceeds the budget, or if
    they may be faster and plans are `compared`.
    """
    helps: dict[str, tuple[bool, int, str]] = {}
    does_not: dict[str, str] = {}

    def judge(name: str, whole: Draft, made: Draft | str, why_not: Callable[[Draft], str]) -> None:
        if isinstance(made, str):
            does_not[name] = f"{name} would not: {made}"
        elif made.peak_bytes <= (1 - WORTH) * whole.peak_bytes:
            helps[name] = made.pace > DEAR * whole.pace, made.peak_bytes, _gain(name, whole, made)
        else:
            does_not[name] = f"{name} would not: {why_not(made)}"

    needless = _needless(seen, ranks=ranks, budget=budget)
    for name, technique in PREDICTIONS.items():
        if technique.quiet and name in seen.refused:
            continue
        if name in needless:
            does_not[name] = NEEDLESS.format(name)
            continue
        n, made = ranks, draft(seen, (name,), ranks=ranks, budget=None)
        if isinstance(made, str) and ranks < technique.needs_ranks:
            n = technique.needs_ranks
            made = draft(seen, (name,), ranks=n, budget=None)
        whole = as_it_is(seen, n)
        made = made.partition(": ")[2] or made if isinstance(made, str) else made
        if n == ranks and (counted := seen.counts.get(frozenset({name}))) is not None and isinstance(made, Draft):
            made = replace(made, peak_bytes=counted)
        judge(name, whole, made, partial(_why_not, seen, technique, whole))
    if ranks > 1 and stages is None and _stages_are_needless(seen, ranks=ranks, budget=budget, faster=compared):
        does_not[STAGED] = NEEDLESS.format(STAGED)
    elif ranks > 1:
        search, whole = stage_search(), as_it_is(seen, ranks)
        found = (
            result_or_reason(search.best, seen, ranks=ranks, budget=None, options=OPEN) if stages is None else stages
        )
        judge(STAGED, whole, found, lambda made: f"{_instead(whole, made)}, for {search.limit}")
    ordered = sorted(helps, key=lambda name: helps[name][:2])
    return {name: helps[name][2] for name in ordered}, does_not


def _is_last_resort(names: Collection[str]) -> bool:
    """Whether a set is drafted only if nothing else that fits is as fast as it could be."""
    return len(names) > 1 and any(PREDICTIONS[name].last_resort for name in names)


def _least_seconds(names: Collection[str], plain: float, found: Sequence[Draft]) -> float:
    """Return the seconds of the fastest step that a set of techniques could have."""
    # other techniques make no step faster, and those of the last resort take as long beside them as alone
    alone = {one.strategies: one.seconds - plain for one in found}
    return plain + sum(alone.get((name,), 0.0) for name in names if PREDICTIONS[name].last_resort)


def _needless(seen: ProfiledStep, *, ranks: int, budget: int | None) -> frozenset[str]:
    """Return the techniques whose search takes seconds, if the step fits without them, which is faster."""
    known = any(getattr(fact, "known", False) for fact in computed_in(seen.facts))
    if known or not _fits(seen, ranks=ranks, budget=budget):
        return frozenset()
    return frozenset(name for name, technique in PREDICTIONS.items() if technique.slow)


def _stages_are_needless(seen: ProfiledStep, *, ranks: int, budget: int | None, faster: bool = True) -> bool:
    """Whether stages are possible but not worth a search, which would count a step with fewer samples.

    Stages save the time to average the gradients' bytes, which counts only if `faster`; the number of messages stays.
    """
    links = replace(seen.rates.links, latency=0.0)
    saved = collective_seconds("all_reduce", seen.profile.by_kind["gradients"], ranks, links)
    needless = (saved <= WORTH * seen.seconds or not faster) and _fits(seen, ranks=ranks, budget=budget)
    return needless and not isinstance(stage_search().blocks(seen), str)


def _fits(seen: ProfiledStep, *, ranks: int, budget: int | None) -> bool:
    """Whether the step is predicted to fit without techniques."""
    return budget is not None and as_it_is(seen, ranks).peak_bytes <= budget


def _instead(whole: Draft, made: Draft) -> str:
    return f"the peak would be {format_bytes(made.peak_bytes)} instead of {format_bytes(whole.peak_bytes)}"


def _why_not(seen: ProfiledStep, technique: Prediction, whole: Draft, made: Draft) -> str:
    """Return which part of the peak the technique does not reduce, or its other limit."""
    left = [kind for kind in KINDS if kind not in technique.kinds]
    share = sum(seen.profile.by_kind[kind] for kind in left) / seen.profile.peak_bytes
    if share >= MOSTLY:
        *first, last = sorted(left, key=seen.profile.by_kind.__getitem__, reverse=True)
        most = f"{', '.join(first)} and {last}" if first else last
        return f"{100 * share:.0f} % of the peak are {most}, which it leaves as they are"
    return f"{_instead(whole, made)}, for {technique.limit}"


def sets_of_techniques(without: Collection[str] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every set of techniques, the empty one first."""
    names = [name for name in PREDICTIONS if name not in without]
    return chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))


def _chosen(found: list[Draft], limit: int | None) -> Draft:
    fitting = [one for one in found if limit is None or one.peak_bytes <= limit]
    if not fitting:
        return min(found, key=lambda one: (one.peak_bytes, *merit(one)))
    # stages share a batch, so that a step has fewer samples: only if nothing else fits
    fitting = [one for one in fitting if one.model == 1] or fitting
    least = min(one.seconds for one in fitting)
    level = [one for one in fitting if one.seconds <= TIE * least]
    return min(level, key=lambda one: (len(one.strategies), one.peak_bytes))


def merit(one: Draft) -> tuple[float, int, int]:
    """Sort key of plans; smaller is better."""
    return one.pace, len(one.strategies), one.peak_bytes


def _candidate(one: Draft, best: Draft, budget: int | None, *, base: tuple[str, ...], batch_size: int) -> Candidate:
    if one is best:
        verdict = "chosen"
    elif budget is not None and one.peak_bytes > budget:
        verdict = f"exceeds {format_bytes(budget + one.more_bytes)}"
    elif (ratio := one.pace / best.pace) < 1 / TIE:  # a model axis is chosen last
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
    ratio = made.pace / whole.pace
    more = f"{100 * max(0.0, ratio - 1):.0f} % more time" if ratio <= DEAR else f"{ratio:.0f} times the time"
    ranks = made.ranks * made.model
    at = f" on {on_ranks(ranks)}" if ranks > 1 else ""
    return (
        f"{name} would make the peak {format_bytes(made.peak_bytes)} instead of"
        f" {format_bytes(whole.peak_bytes)}{at} ({less:.0f} % less), for about {more}"
    )


def on_ranks(ranks: int) -> str:
    """Format a number of ranks: "2 ranks"."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
