"""The techniques that any module may be planned with: how each changes a plan in the making, and what it leaves.

One row per technique, in the order in which they are added to a plan; what chooses among plans knows nothing of any of
them but its row. A technique that cannot be added says why.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_amp.footprint.module_profile import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, TEMPORARIES
from lightning_amp.planning.modules.chain import Chain, extra_seconds, peak_bytes
from lightning_amp.planning.modules.fsdp_bytes import fsdp_peak_bytes
from lightning_amp.planning.modules.recompute_choice import choose
from lightning_amp.planning.modules.seen import LEAST_SECONDS, Draft, Seen, Target
from lightning_amp.planning.plan.specs import FullyShard, RecomputeBlock
from lightning_amp.planning.time.link_seconds import collective_seconds
from lightning_amp.quantities import format_bytes, format_seconds

Add = Callable[[Seen, Draft, int | None], Draft | str]
"""(step, plan so far, budget) -> the plan with the technique, or why not. With a budget there is as much of it as is
needed to fit, and as little memory as can be where that is not enough; with None there is all of it."""
CLOSE = 0.002
"""Part of the peak to which the least is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """A row.

    Attributes:
        add: Adds it to a plan.
        kinds: Kinds of bytes that it makes smaller.
        limit: Why it may not help where these are most of the peak.
        fewest: Ranks that it needs.
        counted: Whether a count of the step with its rules installed, on one device, has what it saves.
    """

    add: Add
    kinds: tuple[str, ...]
    limit: str
    fewest: int = 1
    counted: bool = True


def _fsdp(seen: Seen, draft: Draft, budget: int | None) -> Draft | str:
    """Every rank has a part of parameters, gradients and optimiser state, and gathers a block's when it works."""
    whole = sum(unit.whole_bytes() for unit in seen.units)
    if not whole:
        return "there are no parameters that can be split"
    ranks, links = draft.ranks, seen.rates.links
    saved = seen.peak_bytes(ranks) - fsdp_peak_bytes(seen.profile, seen.units, ranks)
    # twice gathered, once summed and scattered, in the place of one average
    sent = 2 * collective_seconds("all_gather", whole / ranks, ranks, links)
    sent += collective_seconds("reduce_scatter", whole, ranks, links)
    sent -= collective_seconds("all_reduce", whole, ranks, links)
    why = f"{format_bytes(whole)} of parameters, their gradients and optimiser state are split over {ranks} ranks"
    targets = [
        Target(strategy="fsdp", fqn=unit.fqn, spec=FullyShard(), why=why, saves_bytes=0)
        for unit in seen.units
    ]
    # of the technique as a whole, shown once
    targets[-1] = replace(targets[-1], saves_bytes=max(0, saved))
    return replace(
        draft,
        peak_bytes=draft.peak_bytes - saved,
        seconds=draft.seconds + max(0.0, sent),
        targets=(*draft.targets, *targets),
    )


def _recompute(seen: Seen, draft: Draft, budget: int | None) -> Draft | str:
    """Blocks keep nothing but their inputs, and run again in the backward pass."""
    chain = seen.chain
    if not chain.names:
        fixed = next((block for block in chain.blocks if block.fixed), None)
        return (
            "the step calls no block, that is no child of a list or a sequence of modules"
            if fixed is None
            else f"no block can run a second time; of {fixed.fqn!r} {fixed.fixed}"
        )
    relief = seen.peak_bytes(draft.ranks) - draft.peak_bytes
    names = chain.names if budget is None else _blocks(chain, budget + relief)
    seconds = extra_seconds(chain, names)
    return replace(
        draft,
        peak_bytes=max(0, peak_bytes(chain, names) - relief),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, *(_recomputed(chain, name, len(names)) for name in names)),
    )


def _blocks(chain: Chain, budget: int) -> tuple[str, ...]:
    """The fastest choice within a budget, or that with the least bytes; at least one block where any may help."""
    found = choose(chain, max(0, budget))
    if found is not None:
        return found.recomputed or chain.names
    low, high = max(0, budget), peak_bytes(chain, chain.names)
    best = chain.names
    while high - low > CLOSE * high:
        middle = (low + high) // 2
        found = choose(chain, middle)
        if found is None:
            low = middle
        else:
            best, high = found.recomputed, min(middle, found.peak_bytes)
    return best or chain.names


def _recomputed(chain: Chain, name: str, n: int) -> Target:
    calls = [block for block in chain.blocks if block.fqn == name]
    saved, seconds = sum(c.saved_bytes for c in calls), sum(c.forward_seconds for c in calls)
    seconds = max(seconds, LEAST_SECONDS)
    of_all = f"{n} of {len(chain.names)} blocks are computed again"
    return Target(
        strategy="recompute",
        fqn=name,
        spec=RecomputeBlock(),
        why=f"{of_all}, this one keeps {format_bytes(saved)} less and takes {format_seconds(seconds)} more",
        saves_bytes=saved,
    )


TECHNIQUES: dict[str, Technique] = {
    "fsdp": Technique(
        add=_fsdp,
        kinds=(PARAMETERS, GRADIENTS, STATE),
        limit="what is gathered together is whole while it works",
        fewest=2,
        counted=False,
    ),
    "recompute": Technique(
        add=_recompute,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the blocks keep little beside their inputs, or one of them needs as much by itself",
    ),
}
