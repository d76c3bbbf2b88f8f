"""Which plan is fastest on this device, found out by training with them, one axis of the decoder after the other.

Every legal plan computes the same numbers, so steps are not lost by trying: the race begins with the plan that `auto`
chose, and on each axis (activations, attention, likelihood, decode) its other choices run, with what has won on the
axes before. What ranks split (mesh, placement, features) is the same in all of them: optimisers, gradients and
checkpoints know of it, and it is left to the prediction; with sharded parameters there is no race. Plans that exceed
the memory do not run. A lap is `WARM_UP` steps that do not count and `TIMED` that do, of which the least counts, for
other work on the machine only slows a step down; it ends early for a plan that is `APART` times slower than the best
one so far.
"""

from collections.abc import Collection, Generator
from dataclasses import dataclass
from math import inf

from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.plan.strategies import in_order
from lightning_amp.planning.policies.auto import ACTIVATIONS, ATTENTIONS, DECODES, LIKELIHOODS, SPARE

WARM_UP, TIMED = 1, 3
APART = 1.25
LEVEL = 1.01
"""A rival that is not faster than this does not take the place of the plan that leads."""

Strategies = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a race has found.

    Attributes:
        seconds: Least seconds of a step of every plan that ran, in the order in which they ran.
    """

    winner: Strategies
    seconds: dict[Strategies, float]


def entered_in(plan: Plan) -> set[Strategies]:
    """Strategies of the candidates for the plan's mesh that leave memory to spare, or need no more than the plan does.

    A prediction can be too low, and a plan that is only tried may not end a run.
    """
    most = inf if plan.budget_bytes is None else max(plan.predicted_peak_bytes, SPARE * plan.budget_bytes)
    return {
        c.strategies
        for c in plan.candidates
        if (c.data, c.model) == (plan.mesh.data, plan.mesh.model) and c.peak_bytes <= most
    }


def race(first: Strategies, entered: Collection[Strategies]) -> Generator[Strategies, float, Result]:
    """Yields the strategies to take the next step with, is sent its seconds (inf: refused), and returns the result."""
    seconds: dict[Strategies, float] = {}
    best = first
    seconds[first] = yield from _lap(first, inf)
    for axis in (ACTIVATIONS, ATTENTIONS, LIKELIHOODS, DECODES):
        of_axis = {strategy for choice in axis for strategy in choice}
        for choice in axis:
            rival = in_order((set(best) - of_axis) | set(choice))
            if rival in entered and rival not in seconds:
                seconds[rival] = yield from _lap(rival, seconds[best])
        fastest = min(seconds, key=seconds.__getitem__)
        if LEVEL * seconds[fastest] < seconds[best]:
            best = fastest
    return Result(best, {runner: least for runner, least in seconds.items() if least < inf})


def _lap(runner: Strategies, to_beat: float) -> Generator[Strategies, float, float]:
    """Least seconds of one plan."""
    for _ in range(WARM_UP):
        if (yield runner) == inf:
            return inf
    least = inf
    for _ in range(TIMED):
        least = min(least, (yield runner))
        if least > APART * to_beat:
            break
    return least
