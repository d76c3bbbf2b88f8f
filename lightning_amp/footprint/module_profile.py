"""Define `ModuleProfile`: what a training step of a module needs, printable and stored as JSON.

Legend: sizes end in `_bytes`; a module is named as `named_modules` names it, the LightningModule itself is "".

It summarises creations and releases of storages. The clock counts operators. A storage is alive at t if it was born at
or before the t-th operator and had not died before that operator's results were counted; bytes over time are a running
sum of births and deaths.

    kind               counts
    parameters         parameters and buffers
    gradients          of parameters
    optimiser state    what the optimiser keeps between steps
    activations        the batch, and what a forward pass made that is alive when the next backward pass begins
    temporaries        all else
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

SCHEMA = 1
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimiser state"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
HELD = (PARAMETERS, GRADIENTS, STATE)
"""What a step keeps for the next one."""
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES)
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser"
PHASES = {FORWARD: "forward pass", BACKWARD: "backward pass", OPTIMISER: "optimiser's step"}
Part = Literal["parameters", "tensor", "saved", "head"]
PARTS: tuple[Part, ...] = ("parameters", "tensor", "saved", "head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleBytes:
    """What one module holds at the peak, its children not counted, by kind."""

    fqn: str
    n_bytes: int
    by_kind: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBytes:
    """One tensor that is alive at the peak.

    Attributes:
        name: Of a parameter; "NAME.grad" of its gradient; "NAME.KEY" of what the optimiser keeps for it; "batch"; else
            the operator that made the tensor, with "backward of" before it where the backward pass did.
        fqn: Module that holds it or made it.
    """

    name: str
    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A stretch of the step in which one module worked: the bytes alive by kind when there were most.

    Attributes:
        n_operators: Length of the stretch.
    """

    phase: str
    fqn: str
    by_kind: dict[str, int]
    n_operators: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleProfile:
    """The second training step of one LightningModule on one device.

    Attributes:
        peak_bytes: Most bytes alive at once: parameters and buffers, gradients, optimiser state, the batch, activations
            and temporaries.
        largest: The largest of `parts`.
        parts: The peak in parts by what would make them smaller. `parameters`: with gradients, optimiser state
            and what the optimiser's step makes.
            `head`: logits, and what the loss makes of their shape. `tensor`: the largest other tensor, with those of
            its shape that the same module has alive. `saved`: all other activations and temporaries.
        by_kind: The peak by kind.
        peak_phase: "forward", "backward" or "optimiser".
        peak_module: Module that was at work at the peak.
        modules: Modules by what they hold at the peak, largest first.
        tensors: Tensors alive at the peak, largest first.
        timeline: The step from its first operator to its last.
        measured: "fake tensors", or "a real step" where the step needs values.
        reason: Why the step could not run on fake tensors, "" where it could.
        batch_size: Length of the batch's first dimension, None where its tensors have none in common.
        added_bytes: Gradients that are there when the backward pass begins, to which it adds its own.
        first_bytes: Most bytes alive at once in the first step.
        left_bytes: Made by that step and kept, without gradients and optimiser state, such as what is logged;
            it is none of the second step's bytes.
        counted: What `lightning_amp.plan` plans by, None of a profile that it cannot plan by; not stored.
    """

    peak_bytes: int
    largest: Part
    parts: dict[str, int]
    by_kind: dict[str, int]
    peak_phase: str
    peak_module: str
    modules: tuple[ModuleBytes, ...]
    tensors: tuple[TensorBytes, ...]
    timeline: tuple[Moment, ...]
    measured: str
    reason: str = ""
    batch_size: int | None = None
    added_bytes: int = 0
    first_bytes: int = 0
    left_bytes: int = 0
    schema: int = SCHEMA
    counted: Any = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, counted=None))
        del plain["counted"]
        return plain

    def plot(
        self,
        path: str | Path,
        *,
        predicted: "ModuleProfile | None" = None,
        budget_bytes: int | None = None,
        title: str = "memory of a training step",
    ) -> Path:
        """Draw the step as an area by kind over its operators, with the modules that hold most at the peak.

        Args:
            path: PNG to write; returned.
            predicted: The same step as it was predicted, drawn as a line, next to the modules of this one.
            budget_bytes: Memory that may be used.
            title: What was run.
        """
        # matplotlib is slow to load, and only needed where a picture is drawn
        from lightning_amp.figures import StepCurve, step_memory

        def curve(profile: ModuleProfile) -> StepCurve:
            return StepCurve(
                phases=[moment.phase for moment in profile.timeline],
                lengths=[moment.n_operators for moment in profile.timeline],
                by_kind={kind: [m.by_kind[kind] for m in profile.timeline] for kind in KINDS},
                holders={row.fqn: row.by_kind for row in profile.modules},
            )

        at = f"{PHASES[self.peak_phase]} of {self.peak_module or 'the module itself'}"
        step_memory(
            Path(path),
            curve(self),
            predicted=None if predicted is None else curve(predicted),
            at=at,
            budget_bytes=budget_bytes,
            title=title,
        )
        return Path(path)


@dataclass(slots=True)
class Life:
    """One storage. `kind` is "" until it is known; `order` is the place in the forward pass of the operator that made
    the storage, or of which the backward pass made it; `death` is None while the storage is alive.
    """

    name: str = ""
    fqn: str = ""
    kind: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    n_bytes: int = 0
    birth: int = 0
    order: int = -1
    death: int | None = None


class Head(NamedTuple):
    """The last product with a parameter in a forward pass: where it stands, and the shape of what it returns."""

    order: int
    shape: tuple[int, ...]


def summarize(lives: Sequence[Life], work: Sequence[tuple[str, str]], head: Head | None, **about: Any) -> ModuleProfile:
    """The profile of a step.

    Args:
        lives: Every storage that was alive in the step.
        work: Phase and module of every operator.
        head: Of the last forward pass; None where it had no product with a parameter.
        about: Fields of ModuleProfile that are taken as they are.
    """
    assert work, "a step has operators"
    _name_kinds(lives, work)
    # what begins and ends at every operator, of which the sum is what is alive: [kind, operator]
    changes = np.zeros((len(KINDS), len(work) + 1), dtype=np.int64)
    for life in lives:
        row = KINDS.index(life.kind)
        changes[row, life.birth] += life.n_bytes
        changes[row, len(work) if life.death is None else min(life.death + 1, len(work))] -= life.n_bytes
    by_kind = changes.cumsum(1)[:, : len(work)]
    total = by_kind.sum(0)
    # the operator of the peak
    at = int(np.argmax(total))
    # gradients that are there before the backward pass adds its own
    begins = next((t for t, (phase, _) in enumerate(work) if phase == BACKWARD), None)
    added = 0 if begins is None else int(by_kind[KINDS.index(GRADIENTS), begins])
    alive = (v for v in lives if v.n_bytes and v.birth <= at and (v.death is None or v.death >= at))
    peak = sorted(alive, key=lambda life: -life.n_bytes)
    parts = _parts(peak, work, head)
    of_module: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for life in peak:
        of_module[life.fqn][life.kind] += life.n_bytes
    modules = [ModuleBytes(fqn=fqn, n_bytes=sum(kinds.values()), by_kind=kinds) for fqn, kinds in of_module.items()]
    # of operators in a row of one module and phase, the one with most bytes stands for all
    moments = []
    for (phase, fqn), grouped in groupby(range(len(work)), key=work.__getitem__):
        stretch = list(grouped)
        fullest = _row(by_kind, max(stretch, key=total.__getitem__))
        moments.append(Moment(phase=phase, fqn=fqn, by_kind=fullest, n_operators=len(stretch)))
    return ModuleProfile(
        peak_bytes=int(total[at]),
        largest=max(PARTS, key=parts.__getitem__),
        parts=parts,
        by_kind=_row(by_kind, at),
        peak_phase=work[at][0],
        peak_module=work[at][1],
        modules=tuple(sorted(modules, key=lambda row: (-row.n_bytes, row.fqn))),
        tensors=tuple(
            TensorBytes(name=v.name, fqn=v.fqn, kind=v.kind, shape=v.shape, dtype=v.dtype, n_bytes=v.n_bytes)
            for v in peak
        ),
        timeline=tuple(moments),
        added_bytes=added,
        **about,
    )


def _name_kinds(lives: Iterable[Life], work: Sequence[tuple[str, str]]) -> None:
    """What the forward pass leaves to the backward pass are activations, of the rest nothing is kept."""
    next_backward, found = [len(work)] * len(work), len(work)
    for t in range(len(work) - 1, -1, -1):
        found = t if work[t][0] == BACKWARD else found
        next_backward[t] = found
    for life in lives:
        if not life.kind:
            until = next_backward[life.birth]
            kept = until < len(work) and (life.death is None or life.death >= until)
            life.kind = ACTIVATIONS if kept and work[life.birth][0] == FORWARD else TEMPORARIES


def _row(by_kind: Any, at: int) -> dict[str, int]:
    return {kind: int(n) for kind, n in zip(KINDS, by_kind[:, at], strict=True)}


def _parts(peak: Iterable[Life], work: Sequence[tuple[str, str]], head: Head | None) -> dict[str, int]:
    """The peak by what would make it smaller; see ModuleProfile."""
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    groups: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for life in peak:
        if life.kind in HELD or work[life.birth][0] == OPTIMISER:
            parts["parameters"] += life.n_bytes
        # the head's result, or what was made after it with as many columns or as many values
        elif (
            head is not None
            and life.order >= head.order
            and (life.shape[-1:] == head.shape[-1:] or prod(life.shape) == prod(head.shape))
        ):
            parts["head"] += life.n_bytes
        elif life.name == "batch":
            parts["saved"] += life.n_bytes
        else:
            groups[life.fqn, life.shape] += life.n_bytes
    parts["tensor"] = max(groups.values(), default=0)
    parts["saved"] += sum(groups.values()) - parts["tensor"]
    return parts
