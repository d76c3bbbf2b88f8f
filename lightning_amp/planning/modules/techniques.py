"""The techniques that any module may be planned with: how each changes a plan in the making, and what it leaves.

One row per technique, in the order in which they are added to a plan; what chooses among plans knows nothing of any of
them but its row. A technique that cannot be added says why.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_amp.footprint.module_profile import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, TEMPORARIES
from lightning_amp.costs.chain import CHUNKED, Chain, extra_seconds, peak_bytes
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.fsdp.bytes_of_ranks import fsdp_held_bytes, fsdp_peak_bytes
from lightning_amp.techniques.fsdp.seconds import fsdp_seconds
from lightning_amp.techniques.logits.predict import add as add_logits
from lightning_amp.techniques.recompute.choose import choose, leanest
from lightning_amp.techniques.replay.predict import add as add_replays
from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, Seen, Target
from lightning_amp.costs.group_reasons import group_reasons
from lightning_amp.techniques.specs import ChunkBlock, FullyShard, RecomputeBlock
from lightning_amp.quantities import format_bytes, format_seconds

Add = Callable[[Seen, Draft, int | None], Draft | str]
"""(step, plan so far, budget) -> the plan with the technique, or why not. With a budget there is as much of it as is
needed to fit, and as little memory as can be where that is not enough; with None there is all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """A row.

    Attributes:
        add: Adds it to a plan.
        kinds: Kinds of bytes that it makes smaller.
        limit: Why it may not help where these are most of the peak.
        fewest: Ranks that it needs.
        counted: Whether a count of the step with its rules installed, on one device, has what it saves.
        slow: Whether to look for it takes seconds, which are not spent where a step fits without.
    """

    add: Add
    kinds: tuple[str, ...]
    limit: str
    fewest: int = 1
    counted: bool = True
    slow: bool = False


def _fsdp(seen: Seen, draft: Draft, budget: int | None) -> Draft | str:
    """Every rank has a part of parameters, gradients and optimiser state, and gathers a block's when it works."""
    whole = sum(unit.whole_bytes() for unit in seen.units)
    if not whole:
        return "there are no parameters that can be split"
    ranks, spec = draft.ranks, seen.fsdp or FullyShard()
    shard = spec.shard_ranks or ranks
    # the host's memory is the device's where the device is its processor
    offload = spec.offload and seen.rates.launches
    peak = fsdp_peak_bytes(seen.profile, seen.units, shard, offload=offload) + seen.agreed_bytes(ranks)
    saved = draft.peak_bytes - peak
    why = f"{format_bytes(whole)} of parameters, their gradients and optimiser state are split over {shard} ranks"
    why += f", the same in each of {ranks // shard} groups" if shard < ranks else ""
    why += ", and lie in the host's memory" if offload else ""
    targets = [
        Target(strategy="fsdp", fqn=unit.fqn, spec=spec, why=why, saves_bytes=0) for unit in seen.units
    ]
    # of the technique as a whole, shown once
    targets[-1] = replace(targets[-1], saves_bytes=max(0, saved))
    return replace(
        draft,
        peak_bytes=peak,
        relief_bytes=peak_bytes(seen.chain, ()) - peak,
        floor_bytes=0,
        seconds=draft.seconds + fsdp_seconds(seen, spec, ranks),
        targets=(*draft.targets, *targets),
        held_bytes=fsdp_held_bytes(seen.profile, seen.units, shard, offload=offload),
    )


def _recompute(seen: Seen, draft: Draft, budget: int | None) -> Draft | str:
    """Blocks keep nothing but their inputs, and run again in the backward pass."""
    chain = draft.chain or seen.chain
    if not chain.names:
        return (
            all_fixed(chain)
            or "the step calls no child of a list or a sequence of modules; blocks= names others"
        )
    names = chain.names if budget is None else _blocks(chain, budget + draft.relief_bytes)
    seconds = extra_seconds(chain, names)
    return replace(
        draft,
        peak_bytes=draft.with_chain_peak(peak_bytes(chain, names)),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, *(_recomputed(chain, name, len(names)) for name in names)),
    )


def all_fixed(chain: Chain) -> str:
    """Why no block can run a second time; "" where one can, and where there is none."""
    fixed = group_reasons(
        (block.fqn, block.fixed) for block in chain.blocks if block.fixed and not block.after
    )
    return f"no block can run a second time; {fixed}" if fixed and not chain.names else ""


def _blocks(chain: Chain, budget: int) -> tuple[str, ...]:
    """The fastest choice within a budget, or that with the least bytes; at least one block where any may help."""
    budget = max(0, budget)
    found = choose(chain, budget) or leanest(chain, at_least=budget)
    return found.recomputed or chain.names


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


def _chunk(seen: Seen, draft: Draft, budget: int | None) -> Draft | str:
    """Parts of blocks run in chunks; of a plan that recomputes, every block has the better of the two, or both."""
    if "logits" in draft.strategies:
        return "it is not supported together with logits"
    before = [target.fqn for target in draft.targets if target.strategy == "recompute"]
    forms = seen.chunks
    if forms is None or forms.reason:
        return "the blocks were not looked at" if forms is None else forms.reason
    found = forms.choose(None if budget is None else budget + draft.relief_bytes, recompute=bool(before))
    chunked = {name: form for name, form in found.forms.items() if form >= CHUNKED}
    again = [*found.recomputed, *(name for name, form in chunked.items() if forms.form(name, form).again)]
    if not chunked:
        return "no block takes less in chunks, or none has to"
    if before and not again:
        return "chunks alone do as well"
    others = tuple(target for target in draft.targets if target.strategy != "recompute")
    n_blocks = len({block.fqn for block in forms.chain.blocks if block.fqn in chunked and not block.after})
    return replace(
        draft,
        peak_bytes=draft.with_chain_peak(found.peak_bytes),
        seconds=draft.seconds - extra_seconds(seen.chain, before) + found.extra_seconds,
        targets=(
            *others,
            *(_recomputed(seen.chain, name, len(again)) for name in again),
            *(in_chunks(forms, name, form, n_blocks) for name, form in chunked.items()),
        ),
    )


def in_chunks(forms: ChunkForms, name: str, number: int, n: int) -> Target:
    """What a plan has of a block in one of its forms in chunks, where so many blocks have one."""
    form, calls = forms.form(name, number), [b for b in forms.chain.blocks if b.fqn == name]
    seconds = sum(call.extra_seconds(number) - form.again * call.forward_seconds for call in calls)
    blocks, after = {block.fqn for block in forms.chain.blocks if not block.after}, calls[0].after
    what = f"{n} of {len(blocks)} blocks run in chunks, this one"
    if after:
        what = f"what follows its {after} blocks runs in chunks,"
    within = f"within {format_bytes(form.budget_bytes)} beside its arguments"
    return Target(
        strategy="chunk",
        fqn=name,
        spec=ChunkBlock(budget_bytes=form.budget_bytes, after=calls[0].after),
        why=f"{what} {within}, for {format_seconds(max(seconds, LEAST_SECONDS))} more",
        saves_bytes=0 if form.again else max(0, sum(c.saved_bytes - c.held(number)[0] for c in calls)),
    )


TECHNIQUES: dict[str, Technique] = {
    "fsdp": Technique(
        add=_fsdp,
        kinds=(PARAMETERS, GRADIENTS, STATE),
        limit="what is gathered together is whole while it works",
        fewest=2,
        counted=False,
    ),
    "logits": Technique(
        add=add_logits,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the peak is elsewhere",
        slow=True,
    ),
    "recompute": Technique(
        add=_recompute,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the blocks keep little beside their inputs, or one of them needs as much by itself",
    ),
    "chunk": Technique(
        add=_chunk,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the peak is outside of the blocks, or what they keep is whole between the chunks",
        slow=True,
    ),
    "replay": Technique(
        add=add_replays,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="one operator needs as much by itself, or the peak is in the optimiser's step",
        slow=True,
    ),
}
