"""Define the row of replay in the table of techniques: the fastest replays within the budget are added to a plan."""

from dataclasses import replace

from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.replay.choose_cuts import Replays
from lightning_amp.techniques.replay.spec import ReplayOperators, written
from lightning_amp.techniques.technique import Installer, Prediction, Technique

TOGETHER = ("logits",)
RECORDED = 3e-5
"""Seconds that it takes to record an operator, of one core of a server's processor."""


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Stretches of the step are computed again in the backward pass, whatever code they are."""
    others = [name for name in draft.strategies if name not in TOGETHER]
    if others:
        return f"it is not supported together with {' and '.join(others)}"
    look = seen.facts.get("replay")
    if look is None:
        return "the operators of the step were not looked at"
    replays: Replays = look(draft.targets)
    stretches = replays.stretches
    if isinstance(stretches, str):
        return stretches
    rest = draft.peak_bytes - stretches.all_saved
    cuts = replays.choose(None if budget is None else budget - rest)
    if isinstance(cuts, str):
        return cuts
    saved = stretches.all_saved - cuts.n_bytes
    n = sum(again for _, again in cuts.segments)
    seconds = cuts.seconds + RECORDED * int(stretches.places[-1])
    took = format_seconds(max(seconds, LEAST_SECONDS))
    what = f"{n} stretch{'es' * (n > 1)} of the step run again"
    why = f"{what}, which keeps {format_bytes(saved)} less and takes {took} more"
    spec = ReplayOperators(ends=written(cuts.segments))
    return replace(
        draft,
        peak_bytes=max(draft.peak_bytes - saved, seen.held_bytes),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, Rule(strategy="replay", fqn="", spec=spec, why=why, saves_bytes=saved)),
    )


ROW = Technique(
    title="replay of operators",
    shrinks="what autograd keeps of any code to what stretches of it read",
    specs=(ReplayOperators,),
    installers={ReplayOperators: Installer("lightning_amp.techniques.replay.install:install")},
    look="lightning_amp.techniques.replay.install:look",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="one operator needs as much by itself, or the peak is in the optimiser's step",
        turn=4,
        slow=True,
    ),
)
