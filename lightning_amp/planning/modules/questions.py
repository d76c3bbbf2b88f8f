"""Two questions about a module's step under a budget: the largest batch that fits, and the fewest devices."""

from collections.abc import Callable

from lightning_amp.errors import AmpError
from lightning_amp.planning.modules.candidates import as_it_is, on_ranks
from lightning_amp.planning.modules.leanest import fewest_ranks, over_data, over_stages, spelled
from lightning_amp.planning.modules.seen import Draft, Seen
from lightning_amp.quantities import format_bytes

MOST_STEPS = 12
"""Steps that are profiled for one answer."""
MOST_BATCH = 2**24

SeenAt = Callable[[int], Seen]
"""Length of a rank's batch -> its step."""


def answers(seen_at: SeenAt, seen: Seen, *, ranks: int, budget: int) -> list[str]:
    """Both answers, as sentences for a plan on so many ranks, be they of a data axis or stages."""
    start = seen.profile.batch_size
    found = [_devices(seen, budget)]
    if start is None:
        return [*found, "the largest batch is not known: the tensors of a batch have no length in common"]
    known = {start: seen}

    def at(n: int) -> Seen:
        if n not in known:
            known[n] = seen_at(n)
        return known[n]

    try:
        plain = largest_batch(lambda n: as_it_is(at(n), ranks).peak_bytes, budget, start)
        lean = largest_batch(lambda n: over_data(at(n), ranks).peak_bytes, budget, start)
        # as of policy auto, where the batch fits in no other way
        stages = over_stages(seen, ranks) if lean < start else []
        shared = (
            largest_batch(lambda n: over_stages(at(n), ranks)[0].peak_bytes, budget, start) if stages else 0
        )
    except AmpError as error:
        return [*found, f"the largest batch is not known: one of another length cannot be counted: {error}"]
    within = f"the largest batch of a rank that fits {format_bytes(budget)}"
    if not lean and not shared:
        return [*found, f"{within}: none, not even one of 1"]
    more = ""
    if lean > plain:
        more += f", {lean:,} with {' and '.join(over_data(at(lean), ranks).strategies)}"
    # of a pipeline's ranks one batch
    if stages and shared > lean * stages[0].model:
        more += (
            f", {shared:,} with {' and '.join(stages[0].strategies)}, which {on_ranks(stages[0].model)} share"
        )
    return [*found, f"{within} on {on_ranks(ranks)}: {plain or 'none'} with the step as it is{more}"]


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


def _devices(seen: Seen, budget: int) -> str:
    found: Draft | None = fewest_ranks(seen, budget)
    length = seen.profile.batch_size
    where = "for all of them" if found is not None and found.model > 1 else "on each"
    each = "" if length is None else f" with a batch of {length:,} {where}"
    if found is None:
        return f"no number of devices has the memory for this step{each}: take a smaller batch"
    return f"the fewest devices for this step{each}: {found.ranks * found.model}, {spelled(found)}"
