"""Define the entry of activation checkpointing in the table of techniques: its specs and its prediction."""

from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_amp.costs.choose_forms import choose, leanest, rules_again
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.footprint.chain.chain import Chain, extra_seconds, peak_bytes
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.techniques.hic.rows import AGAIN
from lightning_amp.techniques.technique import Installer, Prediction, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeStrata:
    """Keep no activations of a stratum for the backward pass, and compute it again there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeBlock:
    """Keep only the inputs of a block of any module for the backward pass, and compute it again there."""

    again: ClassVar[bool] = True


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Let blocks keep only their inputs, and run again in the backward pass."""
    chain = draft.chain or seen.chain
    if not chain.names:
        return chain.all_fixed or "the step calls no child of a list or a sequence of modules; blocks= names others"
    names = chain.names if budget is None else _blocks(chain, budget + draft.below_one_device_bytes)
    seconds = extra_seconds(chain, names)
    return replace(
        draft,
        peak_bytes=draft.with_chain_peak(peak_bytes(chain, names)),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, *rules_again("recompute", RecomputeBlock(), chain, names)),
    )


def _blocks(chain: Chain, budget: int) -> tuple[str, ...]:
    """Return the fastest choice within a budget, or that with the fewest bytes; at least one block if any may help."""
    budget = max(0, budget)
    found = choose(chain, budget) or leanest(chain, at_least=budget)
    return found.recomputed or chain.names


ROW = Technique(
    title="recompute",
    shrinks="K strata to one, or a block to its inputs, computed twice",
    beside_compiled=True,
    between_batches=True,
    specs=(RecomputeStrata, RecomputeBlock),
    installers={
        RecomputeStrata: Installer("lightning_amp.techniques.recompute.recompute:recompute_strata", on_decoder=True),
        RecomputeBlock: Installer(
            "lightning_amp.techniques.recompute.recompute:recompute_block", on_blocks=True, last=True
        ),
    },
    works_in_any_steps=True,
    targets=on_decoder(lambda _: RecomputeStrata()),
    choice=("activations", AGAIN),
    conflicts={
        "S3": "chunks keep what they are computed from; use stream, or fused",
        "stream": "both say what is kept of a stratum; stream keeps as little and computes it once",
    },
    refusal="lightning_amp.techniques.recompute.recompute:refusal",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the blocks keep little except their inputs, or one of them needs as much by itself",
        order=2,
    ),
)
