"""Find the plan of a step with the least memory, and the fewest ranks on which one fits, pipelines included.

A pipeline's ranks share a batch, where those of a data axis have one each. The leanest has as many stages as divide the
ranks and as there are blocks, and all blocks that can be are computed again; none runs in chunks, which would have to
be recorded for every number of ranks and length of the batch. A plan that was chosen may have some, and then be the
leanest.
"""

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.errors import PlanError
from lightning_amp.planning.modules.candidates import draft, merit, on_ranks, sets_of_techniques
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.pipeline.options import PipelineOptions, stages_of
from lightning_amp.techniques.pipeline.stages import staged
from lightning_amp.techniques.recompute.row import all_fixed
from lightning_amp.techniques.table import STRATEGIES

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
    fixed = all_fixed(seen.chain)
    said += f" ({fixed})" if fixed else ""
    more = fewest_ranks(seen, budget, above=ranks)
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
    asked = PipelineOptions(
        again=("*",) if "recompute" in plan.strategies else (), chunks=None if "chunk" in plan.strategies else {}
    )
    found = staged(seen, plan.mesh.model, data=plan.mesh.data, budget=0, asked=asked)
    if isinstance(found, str):
        raise PlanError(f"the step cannot run as {plan.mesh.model} stages: {found}")
    return found


def fewest_ranks(seen: ProfiledStep, budget: int, *, above: int = 0) -> Draft | None:
    """The leanest plan for the fewest ranks on which it fits; None where it does on none up to `MOST_RANKS`."""
    found = _fewest_over_data(seen, budget, above)
    most = _blocks(seen) if found is None else min(_blocks(seen), found.ranks - 1)
    # a stage more takes memory from all others, if little
    for stages in range(max(2, above + 1), most + 1):
        for made in _staged(seen, stages, data=1):
            if made.peak_bytes <= budget:
                return made
    return found


def _fewest_over_data(seen: ProfiledStep, budget: int, above: int) -> Draft | None:
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
        made = staged(seen, stages, data=data, budget=0, asked=PipelineOptions(again=again, chunks={}))
        if isinstance(made, Draft):
            return [made]
    return []


def _blocks(seen: ProfiledStep) -> int:
    """That can be stages."""
    whole = stages_of(seen).whole()
    return 0 if isinstance(whole, str) else len(whole.names)


def _leaner(one: Draft) -> tuple[int, tuple[float, int, int]]:
    return one.peak_bytes, merit(one)


def spelled(one: Draft) -> str:
    """Its peak, and its techniques."""
    with_what = f" with {' and '.join(one.strategies)}" if one.strategies else ""
    return f"{format_bytes(one.peak_bytes)}{with_what}"
