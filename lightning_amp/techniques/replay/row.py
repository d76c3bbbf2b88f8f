"""Define the entry of replay in the table of techniques: its spec, and the predicted peak and time with it."""

from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.module_profile import ACTIVATIONS, OPTIMISER, TEMPORARIES
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.replay.choose_cuts import AT_ONCE, KEPT, ONE_BY_ONE, Cuts, Replays, Stretches
from lightning_amp.techniques.technique import Installer, Prediction, Technique

RECORDED = 3.5e-5
"""Seconds to record an operator, on one core of a server CPU."""

MARKS = {KEPT: "-", AT_ONCE: "", ONE_BY_ONE: "+"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOperators:
    """Segments of the training step keep only the tensors they read; their operators run again in the backward pass.

    Attributes:
        ends: Ends of segments, as places among the operators of the forward pass: "120,180-,300+". A segment marked "-"
            is kept without replay, as is the rest of the step. A segment marked "+" is replayed for each of its
            tensors.
        views: Whether operators that only return views are counted as places. They are not in a step that writes to
            views in place: autograd makes these views again, by other operators on fake tensors than on real ones.
        window: Bytes of tensors saved before it that a replay for one tensor also makes.
        keeps: Places of operators that do not run again; their results are kept: "12,30".
        operators: Names of the operators at all places, and the batch's shapes, compressed (planned_order.py), with
            which a step is compared; "" where values decide them, and in older plans.
    """

    again: ClassVar[bool] = True

    ends: str
    views: bool = True
    window: int = 0
    keeps: str = ""
    operators: str = ""

    @property
    def places_kept(self) -> frozenset[int]:
        """Places of operators whose results are kept."""
        return frozenset(int(place) for place in self.keeps.split(",") if place)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The ends and kinds of segments."""
        kinds = {mark: kind for kind, mark in MARKS.items()}
        ends = [(end.rstrip("-+"), end) for end in self.ends.split(",") if end]
        return [(int(place), kinds[end.removeprefix(place)]) for place, end in ends]


def written(segments: list[tuple[int, int]]) -> str:
    """Return segments in the text form of a plan."""
    return ",".join(f"{end}{MARKS[kind]}" for end, kind in segments)


def spec_of(cuts: Cuts, stretches: Stretches) -> ReplayOperators:
    """Return chosen segments as the spec of a rule."""
    return ReplayOperators(
        ends=written(cuts.segments),
        views=stretches.views,
        window=cuts.window,
        keeps=",".join(map(str, cuts.keeps)),
        operators=stretches.operators,
    )


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Replay segments of the step in the backward pass, for any code."""
    others = [name for name in draft.strategies if name != "logits"]
    if others:
        return f"it is not supported together with {' and '.join(others)}"
    look = seen.facts.get("replay")
    if look is None:
        return "the operators of the step were not looked at"
    replays = look(draft.targets)
    if seen.frees_gradients and isinstance(replays, Replays):
        replays = replays.without_gradients()
    stretches = replays.stretches
    if isinstance(stretches, str):
        return stretches
    # replays change only what autograd keeps; the rest of the peak reduces their budget
    rest = draft.peak_bytes - stretches.all_saved
    cuts = replays.choose(None if budget is None else budget - rest)
    if isinstance(cuts, str):
        return cuts
    if not cuts.segments:
        # nothing has to run again beside another technique
        return draft
    saved = stretches.all_saved - cuts.n_bytes
    n = sum(kind != KEPT for _, kind in cuts.segments)
    seconds = cuts.seconds + RECORDED * int(stretches.places[-1])
    took = format_seconds(max(seconds, LEAST_SECONDS))
    what = f"{n} stretch{'es' * (n > 1)} of the step run again"
    but = f" but for {len(cuts.keeps)} operators" if cuts.keeps else ""
    why = f"{what}{but}, which keeps {format_bytes(saved)} less and takes {took} more"
    spec = spec_of(cuts, stretches)
    return replace(
        draft,
        peak_bytes=max(draft.peak_bytes - saved, draft.floor_bytes, _elsewhere(seen)),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, Rule(strategy="replay", fqn="", spec=spec, why=why, saves_bytes=saved)),
    )


def _elsewhere(seen: ProfiledStep) -> int:
    """Return the most bytes that are alive at once where nothing runs again."""
    if seen.frees_gradients:
        # the optimizer's step is part of the backward pass then
        return seen.held_bytes
    of_optimizer = (sum(one.by_kind.values()) for one in seen.profile.timeline if one.phase == OPTIMISER)
    return max(of_optimizer, default=seen.held_bytes)


ROW = Technique(
    title="replay of operators",
    shrinks="what autograd keeps of any code to what stretches of it read",
    between_batches=True,
    specs=(ReplayOperators,),
    installers={ReplayOperators: Installer("lightning_amp.techniques.replay.install:install")},
    look="lightning_amp.techniques.replay.install:look",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="one operator needs as much by itself, or the peak is in the optimiser's step",
        order=4,
        slow=True,
    ),
)
