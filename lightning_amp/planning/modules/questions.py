"""Find the largest batch of a module's step within a budget, and the fewest devices."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.errors import AmpError
from lightning_amp.planning.modules.candidates import as_it_is, on_ranks
from lightning_amp.planning.modules.min_memory_plan import (
    fewest_ranks,
    over_data,
    over_stages,
    smaller,
    spelled,
    with_techniques_of,
)
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes

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
    found = [_devices(seen, budget)]
    if seen.profile.batch_size is None:
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


def _devices(seen: ProfiledStep, budget: int) -> str:
    found: Draft | None = fewest_ranks(seen, budget)
    length = seen.profile.batch_size
    where = "for all of them" if found is not None and found.model > 1 else "on each"
    each = "" if length is None else f" with a batch of {length:,} {where}"
    if found is None:
        return f"no number of devices has the memory for this step{each}: {smaller(seen)}"
    return f"the fewest devices for this step{each}: {found.ranks * found.model}, {spelled(found)}"
