"""Define the entry of early updates in the table of techniques: its spec, and the predicted peak with it.

The gradient of a parameter is alive from its last contribution to its update, instead of to the end of the optimizer's
step. Nothing is computed again, but the optimizer's step is called for each bucket of gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.module_profile import GRADIENTS, OPTIMISER, PARAMETERS, STATE, TEMPORARIES, Moment
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.technique import Installer, Prediction, Technique

NAME = "early_update"
SHARE = 1 / 32
"""Bytes of gradients that wait for each other, as a share of all: an update has its price, whatever its size."""
LEAST_BUCKET = 2**17
"""Least bytes of gradients that wait for each other."""
UPDATE_SECONDS = 1.5e-4
"""Seconds of Python's part of an update of AdamW, on one core of a server CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyUpdate:
    """Parameters are updated within the backward pass, and their gradients are freed.

    Attributes:
        bucket_bytes: Gradients are used once they are together as large as this.
    """

    bucket_bytes: int = 2**20


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Update parameters within the backward pass of the step."""
    if draft.ranks > 1:
        return "ranks average gradients after the backward pass"
    if budget is not None and draft.targets and draft.peak_bytes <= budget:
        return "the step fits without it"
    sizes = seen.gradient_sizes
    if not sizes:
        return "the step has no gradients of its own"
    spec, freed = EarlyUpdate(bucket_bytes=_bucket_bytes(sizes)), freed_bytes(sizes)
    saved = _saved_bytes(seen, draft, alive=sum(sizes) - freed) if freed else 0
    if saved <= 0:
        return "the peak is elsewhere"
    why = (
        f"predicted: parameters are updated once {format_bytes(spec.bucket_bytes)} of gradients are complete, which"
        f" keeps {'at most ' if draft.targets else ''}{format_bytes(saved)} less"
    )
    return replace(
        draft,
        peak_bytes=draft.peak_bytes - saved,
        seconds=draft.seconds + UPDATE_SECONDS * ceil(sum(sizes) / spec.bucket_bytes),
        targets=(*draft.targets, Rule(strategy=NAME, fqn="", spec=spec, why=why, saves_bytes=saved)),
    )


def _bucket_bytes(sizes: Sequence[int]) -> int:
    return max(LEAST_BUCKET, int(SHARE * sum(sizes)))


def freed_bytes(sizes: Sequence[int]) -> int:
    """Return how many bytes of a step's gradients are freed early: all but those of a bucket and the largest one."""
    return max(0, sum(sizes) - _bucket_bytes(sizes) - max(sizes, default=0))


def _saved_bytes(seen: ProfiledStep, draft: Draft, *, alive: int) -> int:
    """Return by how much the peak falls if at most `alive` bytes of gradients are there at a time.

    Of a step without other techniques it follows from the moments of its profile. With others, where moments are not
    known, it is the most that is possible; a count says how much it is.
    """
    if draft.targets:
        return min(sum(seen.gradient_sizes) - alive, draft.peak_bytes - _always(seen, draft) - alive)
    moments = seen.profile.timeline
    share = alive / sum(seen.gradient_sizes)

    def with_early(moment: Moment) -> float:
        kinds = moment.by_kind
        # the optimizer's step makes tensors for the gradients that it uses
        gone = (1 - share) * kinds[TEMPORARIES] if moment.phase == OPTIMISER else 0
        return sum(kinds.values()) - max(0, kinds[GRADIENTS] - alive) - gone

    highest = max(sum(moment.by_kind.values()) for moment in moments)
    return highest - int(max(map(with_early, moments)))


def _always(seen: ProfiledStep, draft: Draft) -> int:
    """Return the bytes of parameters and of the optimizer's state on the device."""
    kinds = seen.profile.timeline[-1].by_kind
    elsewhere = 0 if draft.held_bytes is None else seen.held_bytes - draft.held_bytes
    return kinds[PARAMETERS] + kinds[STATE] - elsewhere


def variants(seen: ProfiledStep, ranks: int) -> Iterator[ProfiledStep]:
    """Yield the step, whose other techniques leave no room for gradients."""
    # several ranks refuse it: the drafts of other techniques, which may be searches, are not made again for that
    yield replace(seen, frees_gradients=ranks == 1)


def _remark(spec: Any, launches: bool) -> str:
    return "early_update: parameters change within the backward pass, so that a step that fails there is not run again"


ROW = Technique(
    title="updates within the backward pass",
    shrinks="gradients, which are used and freed one after the other",
    beside_compiled=True,
    specs=(EarlyUpdate,),
    installers={EarlyUpdate: Installer("lightning_amp.techniques.early_update.install:install", last=True)},
    refusal="lightning_amp.techniques.early_update.readers:refusal",
    remark=_remark,
    prediction=Prediction(
        add=add,
        kinds=(GRADIENTS,),
        limit="activations are most of the peak while gradients are few",
        order=7,
        last_resort=True,
        variants=variants,
    ),
)
