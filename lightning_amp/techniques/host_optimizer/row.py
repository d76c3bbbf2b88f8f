"""Define the entry of the host's optimizer in the table of techniques: its spec, and the prediction with it.

The state of the optimizer is in host memory, so that the device has parameters, gradients and what the passes keep.
For P bytes of trained parameters and S of state, 2 P leave in a step and P come back; the host reads and writes
parameters, gradients and state once. On a GPU the three run beside each other, and after the backward pass.

Known limits: what an update allocates on the host for a moment is not in the bytes of the host.
"""

from dataclasses import dataclass, replace
from math import ceil

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule, splits_parameters
from lightning_amp.footprint.module_profile import OPTIMISER, STATE, TEMPORARIES, Moment
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.host_memory.limit import bounded, host_bytes_of, no_room, page_locked, with_requested
from lightning_amp.techniques.technique import Installer, Prediction, Technique

NAME = "host_optimizer"
LINE = 64
"""Bytes at whose multiples tensors begin in a slot, as torch aligns its own."""
SHARE = 1 / 32
"""Bytes of parameters in a slot, as a share of all: an update has its price, whatever its size."""
LEAST_BUCKET, MOST_BUCKET = 2**17, 2**26
"""Bounds of the bytes of parameters in a slot, unless a parameter is larger."""
ON_ITS_WAY = 2
"""Slots on a device whose copies run beside the host's updates."""
PASSES = 2
"""Times that the host reads or writes parameters, gradients and state in an update, as in fsdp/row.py."""
UPDATE_SECONDS = 1.5e-4
"""Seconds of Python's part of an update of AdamW, on one core of a server CPU."""
ON_CPU = (
    "a CPU's memory is the host's, so that nothing would be free; strategies='host_optimizer' shows what a GPU would"
    " have"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptimizer:
    """The optimizer's state is in host memory, where its step runs.

    Attributes:
        slot_bytes: Host memory for parameters and gradients that are copied together.
        slots: Number of slots; a bucket is updated while others are copied.
        host_memory: Most bytes of host memory that the rank takes; None for 80 % of what is free.
        host_bytes: Predicted bytes of host memory: state and slots.
    """

    slot_bytes: int = 2**20
    slots: int = 1
    host_memory: int | None = None
    host_bytes: int = 0


def on_line(n_bytes: int) -> int:
    """Return the bytes of a tensor with what is left before the next one begins."""
    return ceil(n_bytes / LINE) * LINE


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Keep the optimizer's state on the host."""
    if draft.ranks > 1:
        return "it runs on one rank; fsdp_offload of fsdp is for several"
    if any(splits_parameters(rule) for rule in draft.targets):
        return "fsdp_offload keeps the optimizer's state on the host already"
    requested = seen.requested.get(NAME)
    if requested is None and not seen.rates.launches:
        return ON_CPU
    if budget is not None and draft.targets and draft.peak_bytes <= budget:
        return "the step fits without it"
    sizes, state = seen.gradient_sizes, seen.profile.timeline[-1].by_kind[STATE]
    if not (sizes and state):
        return "the optimizer keeps no state"
    spec = bounded(requested or HostOptimizer(), seen)
    assert isinstance(spec, HostOptimizer), "rules of host_optimizer have this spec"
    bucket = max(LEAST_BUCKET, min(MOST_BUCKET, int(SHARE * sum(sizes))))
    slot = 2 * max(on_line(bucket), on_line(max(sizes)))
    slot, slots = (page_locked(slot), ON_ITS_WAY) if seen.rates.launches else (slot, 1)
    host_bytes, limit, others = state + slots * slot, spec.host_memory, host_bytes_of(draft.targets)
    if why := no_room("the state", host_bytes, spec, seen, draft.targets):
        return why
    saved = _saved_bytes(seen, draft, state)
    seconds = _seconds(seen, state, n_buckets=ceil(2 * sum(sizes) / slot))
    total = f", {format_bytes(others + host_bytes)} with what else waits there" if others else ""
    why = (
        f"predicted: the optimizer's state is on the host and takes {format_bytes(host_bytes)} there{total}, which"
        f" keeps {format_bytes(saved)} less on the device; {format_bytes(3 * sum(sizes))} are copied in a step, which"
        f" takes {format_seconds(seconds)} more"
    )
    spec = replace(spec, slot_bytes=slot, slots=slots, host_bytes=host_bytes)
    return replace(
        draft,
        peak_bytes=draft.peak_bytes - saved,
        seconds=draft.seconds + seconds,
        targets=(
            *(_leaving(rule, limit, host_bytes) for rule in draft.targets),
            Rule(strategy=NAME, fqn="", spec=spec, why=why, saves_bytes=saved),
        ),
        held_bytes=(seen.held_bytes if draft.held_bytes is None else draft.held_bytes) - state,
    )


def _leaving(rule: Rule, limit: int | None, host_bytes: int) -> Rule:
    """Return another technique's rule, with what is left of the host's memory."""
    if limit is None or getattr(rule.spec, "host_memory", None) is None:
        return rule
    return replace(rule, spec=replace(rule.spec, host_memory=limit - host_bytes))


def _saved_bytes(seen: ProfiledStep, draft: Draft, state: int) -> int:
    """Return by how much the peak falls.

    Of a step without other techniques, the temporaries of the optimizer's step are gone too, which may be the peak.
    With others, where moments are not known, a count says how much it is.
    """
    if draft.targets:
        return state

    def left(moment: Moment) -> int:
        gone = state + (moment.by_kind[TEMPORARIES] if moment.phase == OPTIMISER else 0)
        return sum(moment.by_kind.values()) - gone

    moments = seen.profile.timeline
    return max(sum(moment.by_kind.values()) for moment in moments) - max(map(left, moments))


def _seconds(seen: ProfiledStep, state: int, *, n_buckets: int) -> float:
    """Return the seconds that a step takes longer."""
    rates, whole, python = seen.rates, sum(seen.gradient_sizes), UPDATE_SECONDS * n_buckets
    if not rates.launches:
        # the core that computes reads and writes each copy; the update runs there in any case
        return 2 * 3 * whole / rates.memory_bytes + python
    update = PASSES * (2 * whole + state) / rates.host.memory
    return max(whole / rates.host.out + whole / rates.host.back, update + python)


ROW = Technique(
    title="the optimizer on the host",
    shrinks="the optimizer's state, which is in host memory, and what its step makes",
    beside_compiled=True,
    specs=(HostOptimizer,),
    installers={HostOptimizer: Installer("lightning_amp.techniques.host_optimizer.install:install")},
    option_names=("host_memory",),
    options=with_requested,
    remark=lambda spec, launches: "" if launches else f"host_optimizer: {ON_CPU}",
    prediction=Prediction(
        add=add,
        kinds=(STATE,),
        limit="gradients, parameters and what the passes keep stay on the device",
        order=6,
        last_resort=True,
    ),
)
