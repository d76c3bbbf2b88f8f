"""Define the entry of offload in the table of techniques: its spec, its options, and the predicted peak and time.

The tensors that are saved first leave, as many as the budget requires. They come back last, so that their copies have
the most computation beside them; those saved last would be asked for at once. Copies of a direction run one after the
other, beside the pass. What they take longer than the pass is added to the step's time.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any

from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule, runs_again, splits_parameters
from lightning_amp.errors import AmpError
from lightning_amp.footprint.module_profile import ACTIVATIONS
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.host_memory.limit import with_requested
from lightning_amp.techniques.technique import Installer, Prediction, Technique

NAME = "offload"
LEAST_BYTES = 2**20
"""Smaller tensors stay: they are many, and hold little."""
SMALLEST_SHARE = 2**-10
"""In a small step, tensors below this share of what leaves stay instead."""
FORWARD = 1 / 3
"""Share of a step's time in the forward pass: the backward pass has two products for each of its products."""
AHEAD = 2
"""Storages as large as the largest one that may be on their way at once, on a device whose copies run beside it."""
COUNTS = 6
"""Most steps that are counted to find how many tensors leave."""
ON_CPU = "a CPU's memory is the host's, so that nothing would be free; strategies='offload' copies there nevertheless"
UNPROVED = "its copies have not run on a GPU yet, so that it is used by name only; name it in strategies"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Tensors that autograd saves in the training step wait in host memory for the backward pass.

    Attributes:
        leaves: Number of storages of a step that leave, the first that are saved; None for all.
        least_bytes: Smaller storages stay.
        window: W, the most bytes that are on their way in a direction; 0 copies at once.
        host_memory: Most bytes of host memory that a rank takes; None for 80 % of what is free, shared by the ranks of
            a node.
        host_bytes: Predicted bytes of host memory.
        moved_bytes: Predicted bytes that leave in a step, and come back.
    """

    leaves: int | None = None
    least_bytes: int = LEAST_BYTES
    window: int = 0
    host_memory: int | None = None
    host_bytes: int = 0
    moved_bytes: int = 0


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Let tensors that autograd saves leave for host memory, as many as the budget requires."""
    # blocks that run again, and split parameters, save tensors as before
    rules = tuple(rule for rule in draft.targets if not splits_parameters(rule))
    others = dict.fromkeys(rule.strategy for rule in rules if not runs_again(rule))
    if others:
        return f"it is not supported together with {' and '.join(others)}"
    if budget is not None and draft.peak_bytes <= budget:
        budget = None
    look, spec = seen.facts.get(NAME), seen.requested.get(NAME)
    if look is None:
        return "the step was not counted with it"
    assert isinstance(spec, Offload), "the step is counted with it by name only"
    step = _Step(look, rules, spec)
    try:
        step.plain_bytes = look.plain_bytes(rules) if rules else seen.peak_bytes(1)
        step.choose_sizes(ahead=AHEAD if seen.rates.launches else 0)
        if not step.sizes:
            return "autograd saves nothing but parameters, the batch and small tensors"
        # what other ranks hold is not in the count
        within = None if budget is None else step.plain_bytes - (draft.peak_bytes - budget)
        found = step.with_leaves(step.fewest(within))
    except AmpError as error:
        return str(error)
    saved = step.plain_bytes - found.peak_bytes
    if saved <= 0:
        return "the peak is elsewhere"
    seconds = max(LEAST_SECONDS, _exposed(seen, found.left_bytes, found.came_bytes))
    n = found.n_left
    spec = replace(step.spec, leaves=n, host_bytes=found.host_bytes, moved_bytes=found.left_bytes)
    why = (
        f"predicted: {n} tensor{'s' * (n > 1)} wait{'s' * (n == 1)} on the host, which takes"
        f" {format_bytes(found.host_bytes)} there and keeps {format_bytes(saved)} less on the device;"
        f" {format_bytes(found.left_bytes)} leave in a step, which takes {format_seconds(seconds)} more"
    )
    held = seen.held_bytes if draft.held_bytes is None else draft.held_bytes
    return replace(
        draft,
        peak_bytes=max(draft.peak_bytes - saved, held),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, Rule(strategy=NAME, fqn="", spec=spec, why=why, saves_bytes=saved)),
    )


class _Step:
    """Counts of a step from which storages leave.

    Attributes:
        spec: The spec without the number of storages.
        plain_bytes: Peak without the technique.
        sizes: Bytes of the storages that may leave, in the order in which they are saved.
    """

    def __init__(self, look: Any, rules: tuple[Rule, ...], spec: Offload) -> None:
        self._look, self._rules, self.spec = look, rules, spec
        self.plain_bytes, self.sizes = 0, list[int]()

    def choose_sizes(self, *, ahead: int) -> None:
        """Find the storages that may leave; up to `ahead` of the largest may be on their way at once."""
        every = self._look.sizes(self._rules)
        least = min(LEAST_BYTES, max(1, int(SMALLEST_SHARE * sum(every))))
        self.sizes = [size for size in every if size >= least]
        self.spec = replace(self.spec, least_bytes=least, window=ahead * max(self.sizes, default=0))

    def with_leaves(self, n: int) -> Any:
        """Return the counted step from which the first `n` storages leave."""
        return self._look.count(self._rules, replace(self.spec, leaves=n))

    def _peak_bytes(self, n: int) -> int:
        found: int = self.with_leaves(n).peak_bytes
        return found

    def fewest(self, within: int | None) -> int:
        """Return the fewest storages whose leaving keeps the peak within a bound; all if it is None, or never met."""
        host = inf if self.spec.host_memory is None else self.spec.host_memory
        totals = [0, *accumulate(self.sizes)]
        # as many as the host has room for
        low, high = 0, max(n for n, total in enumerate(totals) if total <= host)
        if within is None or (peak := self._peak_bytes(high)) > within:
            return high
        below, above = self.plain_bytes, peak
        for _ in range(COUNTS):
            if high - low <= 1:
                break
            # between the two, by the bytes that leave
            share = (below - within) / max(1, below - above)
            bytes_gone = totals[low] + share * (totals[high] - totals[low])
            middle = min(max(bisect_left(totals, bytes_gone), low + 1), high - 1)
            peak = self._peak_bytes(middle)
            if peak <= within:
                high, above = middle, peak
            else:
                low, below = middle, peak
        return high


def _exposed(seen: ProfiledStep, out: int, back: int) -> float:
    """Return the seconds that copies take beyond the passes beside which they run."""
    rates, seconds = seen.rates, seen.chain.seconds
    if not rates.launches:
        # the core that computes reads and writes both
        return 2 * (out + back) / rates.memory_bytes
    leaving = max(0.0, out / rates.host.out - FORWARD * seconds)
    return leaving + max(0.0, back / rates.host.back - (1 - FORWARD) * seconds)


ROW = Technique(
    title="activations on the host",
    shrinks="what autograd keeps between the passes, which waits in host memory",
    between_batches=True,
    specs=(Offload,),
    installers={Offload: Installer("lightning_amp.techniques.offload.install:install")},
    conflicts={
        "stream": "stream runs the backward pass of a stratum before its forward pass has ended, so nothing waits"
    },
    look="lightning_amp.techniques.offload.install:look",
    option_names=("host_memory",),
    options=with_requested,
    remark=lambda spec, launches: "" if launches else f"offload: {ON_CPU}",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS,),
        limit="tensors that other code holds, or that an operator makes for itself, do not leave",
        order=5,
        slow=True,
    ),
)
