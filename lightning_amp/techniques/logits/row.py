"""Define the entry of logits in the table of techniques: its spec, and the predicted peak and time with it."""

from dataclasses import dataclass, replace

from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.technique import Installer, Prediction, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLogits:
    """Run cross-entropy of a linear layer's outputs in chunks of rows, in the forward and in the backward pass."""


RULE = Rule(fqn="", spec=ChunkLogits(), strategy="logits", why="counted")
WORTH = 0.02
"""Least saving, as a share of the peak, that is worth the additional time."""
NOTHING = (
    "the step has no cross-entropy of a linear layer with eight times as many outputs as inputs, or its peak is"
    " elsewhere"
)


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Run cross-entropy in chunks of rows; the losses of rows repeat the layer's product in the backward pass."""
    if "fsdp" in draft.strategies:
        return "it is not supported together with fsdp"
    if seen.counted is None:
        return "the step was not counted with it"
    least, most = WORTH * seen.profile.peak_bytes, seen.facts.get("logits")
    if most is not None and most < least:
        # a count takes seconds, and could not show a saving
        return NOTHING
    step = seen.counted(RULE)
    if isinstance(step, str):
        return step
    saved = seen.profile.peak_bytes - step.profile.peak_bytes
    if saved < least:
        return NOTHING
    more = max(step.chain.seconds - seen.chain.seconds, LEAST_SECONDS)
    why = f"logits are never whole, which keeps {format_bytes(saved)} less and takes {format_seconds(more)} more"
    target = Rule(strategy="logits", fqn="", spec=ChunkLogits(), why=why, saves_bytes=saved)
    return replace(
        draft,
        peak_bytes=max(draft.peak_bytes - saved, seen.held_bytes),
        seconds=draft.seconds + more,
        targets=(*draft.targets, target),
        chain=step.chain,
    )


ROW = Technique(
    title="cross-entropy in chunks",
    shrinks="logits of a training step, and their gradients, to those of a few rows",
    beside_compiled=True,
    between_batches=True,
    specs=(ChunkLogits,),
    installers={ChunkLogits: Installer("lightning_amp.techniques.logits.install:install")},
    read_step="lightning_amp.techniques.logits.install:read_step",
    prediction=Prediction(add=add, kinds=(ACTIVATIONS, TEMPORARIES), limit="the peak is elsewhere", order=1, slow=True),
)
