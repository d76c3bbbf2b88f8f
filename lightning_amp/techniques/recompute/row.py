"""The row of activation checkpointing: its spec, what it predicts, its options."""

from dataclasses import dataclass, replace

from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain import Chain, extra_seconds, group_reasons, peak_bytes
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.hic.rows import RecomputeStrata
from lightning_amp.techniques.recompute.choose import choose, leanest
from lightning_amp.techniques.technique import Installer, Prediction, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeBlock:
    """Nothing of a block of any module is kept for the backward pass but its inputs; there it is computed again."""


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Blocks keep nothing but their inputs, and run again in the backward pass."""
    chain = draft.chain or seen.chain
    if not chain.names:
        return all_fixed(chain) or "the step calls no child of a list or a sequence of modules; blocks= names others"
    names = chain.names if budget is None else _blocks(chain, budget + draft.relief_bytes)
    seconds = extra_seconds(chain, names)
    return replace(
        draft,
        peak_bytes=draft.with_chain_peak(peak_bytes(chain, names)),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, *(recomputed(chain, name, len(names)) for name in names)),
    )


def all_fixed(chain: Chain) -> str:
    """Why no block can run a second time; "" where one can, and where there is none."""
    fixed = group_reasons((block.fqn, block.fixed) for block in chain.blocks if block.fixed and not block.after)
    return f"no block can run a second time; {fixed}" if fixed and not chain.names else ""


def _blocks(chain: Chain, budget: int) -> tuple[str, ...]:
    """The fastest choice within a budget, or that with the least bytes; at least one block where any may help."""
    budget = max(0, budget)
    found = choose(chain, budget) or leanest(chain, at_least=budget)
    return found.recomputed or chain.names


def recomputed(chain: Chain, name: str, n: int) -> Rule:
    """The rule of a block, one of n that run again."""
    calls = [block for block in chain.blocks if block.fqn == name]
    saved, seconds = sum(c.saved_bytes for c in calls), sum(c.forward_seconds for c in calls)
    seconds = max(seconds, LEAST_SECONDS)
    of_all = f"{n} of {len(chain.names)} blocks are computed again"
    return Rule(
        strategy="recompute",
        fqn=name,
        spec=RecomputeBlock(),
        why=f"{of_all}, this one keeps {format_bytes(saved)} less and takes {format_seconds(seconds)} more",
        saves_bytes=saved,
    )


ROW = Technique(
    title="recompute",
    shrinks="K strata to one, or a block to its inputs, computed twice",
    specs=(RecomputeStrata, RecomputeBlock),
    installers={
        RecomputeStrata: Installer("lightning_amp.techniques.hic.strata.loops:recompute_strata", on_decoder=True),
        RecomputeBlock: Installer(
            "lightning_amp.techniques.recompute.recompute:recompute_block", on_blocks=True, last=True
        ),
    },
    targets=on_decoder(lambda _: RecomputeStrata()),
    choice=("activations", "recompute"),
    conflicts={"stream": "both say what is kept of a stratum; stream keeps as little and computes it once"},
    refusal="lightning_amp.techniques.recompute.recompute:refusal",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the blocks keep little except their inputs, or one of them needs as much by itself",
        turn=2,
    ),
)
