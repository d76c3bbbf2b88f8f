"""Answer what would fit a budget: the largest batch or length of a step, and the fewest devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.errors import AmpError
from lightning_amp.planning.modules.candidates import as_it_is, on_ranks
from lightning_amp.planning.modules.min_memory_plan import (
    fewest_ranks,
    over_data,
    over_stages,
    smaller,
    spelled_peak,
    with_techniques_of,
)
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes

MOST_STEPS = 12
"""Number of steps that are profiled for one answer."""
MOST_COUNTS = 4
"""Number of plans that are counted to confirm one answer."""
ENOUGH = 0.98
"""Share of the budget from which a confirmed answer is not improved."""
MOST_BATCH = 2**24

SeenAt = Callable[[int], ProfiledStep]
"""Function that maps the batch length of a rank to its step."""
CountAt = Callable[[int, Draft], int]
"""Function that maps a batch length and a draft to the peak bytes of the step with the draft's techniques installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """Largest batches that fit; 0 if not even one sample does.

    Attributes:
        plain: Samples per rank without techniques, or the length of another dimension.
        lean: The same with techniques, per rank or per `sharing` ranks.
        techniques: Techniques of `lean`.
        sharing: Ranks that share the batch of `lean`, as stages of a pipeline.
    """

    plain: int
    lean: int
    techniques: tuple[str, ...]
    sharing: int


def largest_batches(
    seen_at: SeenAt, count_at: CountAt, *, start: int, ranks: int, budget: int, named: Plan | None, planned: Plan | None
) -> LargestBatch:
    """Find the largest batches without techniques, and with techniques, which are counted as those of a plan are.

    Args:
        seen_at: Counts the step for another length of the batch, or of another dimension of it.
        count_at: Counts it with the techniques of a draft.
        start: A length that was counted.
        ranks: Ranks of a data axis, or stages.
        budget: Bytes of a device.
        named: A plan whose techniques are the only ones to use; None allows all techniques.
        planned: The plan of `seen`, which was counted with its techniques: it may fit where a prediction does not.

    Raises:
        AmpError: The step cannot be counted with another batch length.
    """

    def with_techniques(n: int) -> Draft:
        return over_data(seen_at(n), ranks) if named is None else with_techniques_of(named, seen_at(n))

    def on_stages(n: int) -> Draft:
        return over_stages(seen_at(n), ranks)[0]

    def plain_peak(n: int) -> int:
        return as_it_is(seen_at(n), ranks).peak_bytes

    plain = largest_batch(plain_peak, budget, start)
    lean = largest_batch(lambda n: with_techniques(n).peak_bytes, budget, start)
    lean = _confirmed(lean, plain, lambda n: count_at(n, with_techniques(n)), budget)
    best = with_techniques(lean or start)
    # as in policy auto: stages only for a batch that fits in no other way
    if named is None and lean < start and over_stages(seen_at(start), ranks):
        shared, staged = largest_batch(lambda n: on_stages(n).peak_bytes, budget, start), on_stages(start)
        # the ranks of a pipeline share one batch
        if shared > lean * staged.model:
            lean, best = shared, staged
    if planned is not None and planned.fits and lean < start:
        return LargestBatch(plain=plain, lean=start, techniques=planned.strategies, sharing=planned.mesh.model)
    return LargestBatch(plain=plain, lean=lean, techniques=best.strategies, sharing=best.model)


def largest_planned(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest length whose plan fits, or one that is less than 2 % smaller; 0 if none fits.

    Args:
        fits: Whether the plan for a length fits; each call makes a plan.
        start: The length to begin with.
    """
    fitting, beyond, n = 0, None, start
    while 1 <= n <= MOST_BATCH and (beyond is None or (fitting < ENOUGH * beyond and fitting + 1 < beyond)):
        if fits(n):
            fitting = n
        else:
            beyond = n
        # downwards in halves until one fits
        n = 2 * fitting if beyond is None else (fitting + beyond) // 2
    return fitting


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
    count_at: CountAt,
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
        devices = f"the fewest devices for this step{each}: {n}, {spelled_peak(peak, techniques)}"
    most, why = None, "the tensors of a batch have no length in common"
    if length is not None:
        try:
            most = largest_batches(
                seen_at, count_at, start=length, ranks=ranks, budget=budget, named=named, planned=planned
            )
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


def _confirmed(length: int, plain: int, counted: Callable[[int], int], budget: int) -> int:
    """Return the length if it is counted to fit, else a smaller one that is; `plain` fits without techniques."""
    peaks, n, low, high = dict[int, int](), length, plain, length + 1
    for _ in range(MOST_COUNTS):
        if n <= low:
            break
        try:
            peaks[n] = counted(n)
        except AmpError:
            # a technique refuses the step once it is installed
            break
        low, high = (n, high) if peaks[n] <= budget else (low, n)
        if high - low <= 1 or ENOUGH * budget <= peaks[n] <= budget:
            break
        n = int(n * budget / peaks[n]) if len(peaks) == 1 else _next(peaks, budget, low, high)
    return low


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
