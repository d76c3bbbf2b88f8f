"""Define `ModuleProfile`: peak memory of a training step by kind, module and tensor, printable and stored as JSON.

Legend: sizes end in `_bytes`. Modules have the names of `named_modules`; the LightningModule itself is "".

A profile summarises when storages are created and released. Time is counted in operators. A storage is alive at t if
it was created at or before the t-th operator, and was not released before the results of that operator were counted.
Bytes over time are a running sum of creations and releases.

    kind               contains
    parameters         parameters and buffers
    gradients          gradients of parameters
    optimiser state    tensors that the optimizer keeps between steps
    activations        the batch, and tensors of a forward pass that are alive when the next backward pass starts
    temporaries        everything else
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

SCHEMA = 1
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimiser state"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
HELD = (PARAMETERS, GRADIENTS, STATE)
"""Kinds that a step keeps for the next one."""
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES)
FORWARD, BACKWARD, REDUCTION, OPTIMISER = "forward", "backward", "reduction", "optimiser"
PHASES = {
    FORWARD: "forward pass",
    BACKWARD: "backward pass",
    REDUCTION: "reduction of gradients",
    OPTIMISER: "optimiser's step",
}
FAKE, REAL = "fake tensors", "a real step"
BATCH = "batch"
"""Name of the tensors of the batch."""
Part = Literal["parameters", "tensor", "saved", "head"]
PARTS: tuple[Part, ...] = ("parameters", "tensor", "saved", "head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleBytes:
    """Bytes that one module holds at the peak by kind, without its children."""

    fqn: str
    n_bytes: int
    by_kind: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBytes:
    """A tensor that is alive at the peak.

    Attributes:
        name: Name of a parameter; "NAME.grad" for its gradient; "NAME.KEY" for its optimizer state; "batch"; or the
            operator that made the tensor, with the prefix "backward of" in the backward pass.
        fqn: Module that holds or made the tensor.
    """

    name: str
    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Consecutive operators of one module in one phase, with the bytes by kind at their peak.

    Attributes:
        n_operators: Number of operators.
    """

    phase: str
    fqn: str
    by_kind: dict[str, int]
    n_operators: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleProfile:
    """Memory profile of a LightningModule's second training step (with optimizer state) on one device.

    Attributes:
        peak_bytes: Most bytes alive at once: parameters and buffers, gradients, optimizer state, the batch, activations
            and temporaries.
        largest: The largest of `parts`.
        parts: The peak, grouped by what would reduce it. `parameters`: also gradients, optimizer state, and tensors of
            the optimizer step. `head`: logits, and tensors of their shape that the loss makes. `tensor`: the largest
            other tensor, and those of its shape in the same module. `saved`: all other activations and temporaries.
        by_kind: The peak by kind.
        peak_phase: "forward", "backward", "reduction" or "optimiser".
        peak_module: Module that was running at the peak.
        modules: Bytes of each module at the peak, largest first.
        tensors: Tensors alive at the peak, largest first.
        timeline: The step from its first operator to its last.
        measured: "fake tensors", or "a real step" if the step cannot run on these, also if told what values decide.
        reason: Why the step needs values; "" if it does not.
        batch_size: Length of the batch's first dimension; None if its tensors do not share one.
        added_bytes: Gradients that exist when the backward pass starts, to which it adds.
        first_bytes: Most bytes alive at once in the first step.
        left_bytes: Bytes that the first step made and kept, without gradients and optimizer state, such as logged
            values; they are not counted in the second step.
        foreseen: What is counted although the two steps do not have it, one sentence each (foreseen.py).
        reads: Numbers that the step reads from the batch (`BatchReads`), by which a batch may take other bytes than
            this one; None if there are none; not stored.
        own_reads: Buffers that the step reads and changes, such as the pointer of a queue: a later step may take other
            bytes than this one; not stored.
        makes: Storages that the step makes (`StepMakes`), to compare a real step with; not stored.
        trace: The step's storages and operators (`StepTrace`), of a step counted for a GPU; not stored.
        noted: Whether the count was given numbers and shapes that values decide in steps of the batch
            (noted_values.py): another batch may take other bytes; not stored.
        counted: Input of `lightning_amp.plan`; None if the profile does not support planning; not stored.
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
    foreseen: tuple[str, ...] = ()
    schema: int = SCHEMA
    reads: Any = field(default=None, repr=False, compare=False)
    makes: Any = field(default=None, repr=False, compare=False)
    trace: Any = field(default=None, repr=False, compare=False)
    own_reads: tuple[str, ...] = field(default=(), repr=False, compare=False)
    noted: bool = field(default=False, repr=False, compare=False)
    counted: Any = field(default=None, repr=False, compare=False)

    @property
    def larger_peak_bytes(self) -> int:
        """Most bytes alive at once in the first step or in this one."""
        return max(self.peak_bytes, self.first_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(replace(self, counted=None, reads=None, makes=None, trace=None))
        for name in ("counted", "reads", "makes", "trace", "own_reads", "noted"):
            del plain[name]
        return plain

    def plot(
        self,
        path: str | Path,
        *,
        predicted: "ModuleProfile | None" = None,
        budget_bytes: int | None = None,
        title: str = "memory of a training step",
    ) -> Path:
        """Plot the step's bytes by kind over its operators, and the modules that hold most at the peak.

        Args:
            path: PNG to write; returned.
            predicted: Predicted profile of the same step, drawn as a line, with its modules next to those of this one.
            budget_bytes: Available memory.
            title: Title of the plot.
        """
        # matplotlib is slow to import, and only needed for plots
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
    """One storage. `kind` is "" until it is determined; `death` is None while the storage is alive. `order` is the
    position in the forward pass of the operator that made the storage, or whose backward made it.
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


class Passed(NamedTuple):
    """A module whose forward has returned: its name, the last operator before that, and the bytes alive then."""

    fqn: str
    operator: int
    n_bytes: int


class Head(NamedTuple):
    """The last product with a parameter in a forward pass: its position, and the shape of its result."""

    order: int
    shape: tuple[int, ...]


def summarize(lives: Sequence[Life], work: Sequence[tuple[str, str]], head: Head | None, **about: Any) -> ModuleProfile:
    """Return the profile of a step.

    Args:
        lives: Every storage that was alive in the step.
        work: Phase and module of every operator.
        head: Head of the last forward pass; None if it had no product with a parameter.
        about: Further fields of ModuleProfile.
    """
    by_kind = bytes_over_time(lives, work)
    total = by_kind.sum(0)
    # the operator of the peak
    at = int(np.argmax(total))
    # gradients that exist before the backward pass adds to them
    begins = next((t for t, (phase, _) in enumerate(work) if phase == BACKWARD), None)
    added = 0 if begins is None else int(by_kind[KINDS.index(GRADIENTS), begins])
    alive = (v for v in lives if v.n_bytes and v.birth <= at and (v.death is None or v.death >= at))
    peak = sorted(alive, key=lambda life: -life.n_bytes)
    parts = _parts(peak, work, head)
    of_module: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for life in peak:
        of_module[life.fqn][life.kind] += life.n_bytes
    modules = [ModuleBytes(fqn=fqn, n_bytes=sum(kinds.values()), by_kind=kinds) for fqn, kinds in of_module.items()]
    # consecutive operators of one module and phase are one Moment, with the bytes of the operator that has most
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


def bytes_over_time(lives: Sequence[Life], work: Sequence[tuple[str, str]]) -> NDArray[np.int64]:
    """Return the bytes alive at every operator, [kind, operator]; missing kinds of storages are set."""
    assert work, "a step has operators"
    _name_kinds(lives, work)
    return np.stack([alive_bytes([life for life in lives if life.kind == kind], len(work)) for kind in KINDS])


def alive_bytes(lives: Iterable[Life], n_operators: int) -> NDArray[np.int64]:
    """Return the bytes alive at every operator, [operator]."""
    found = [(life.birth, n_operators if life.death is None else life.death, life.n_bytes) for life in lives]
    first, last, n_bytes = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return bytes_alive(first, last, n_bytes, n_operators)


def bytes_alive(first: Any, last: Any, n_bytes: Any, length: int) -> NDArray[Any]:
    """Return the bytes alive at every moment, of storages that live from `first` to `last`, which may be before it."""
    # bytes created minus bytes released at every moment; the running sum is the bytes alive
    changes = np.zeros(length + 1, dtype=n_bytes.dtype)
    np.add.at(changes, np.clip(first, 0, length), n_bytes)
    np.subtract.at(changes, np.clip(np.maximum(last + 1, first), 0, length), n_bytes)
    return changes.cumsum()[:length]


def _name_kinds(lives: Iterable[Life], work: Sequence[tuple[str, str]]) -> None:
    """Set missing kinds: activations are kept from the forward to the backward pass, all others are temporaries."""
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
    """Return the peak, grouped by what would reduce it; see ModuleProfile."""
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    groups: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for life in peak:
        if life.kind in HELD or work[life.birth][0] == OPTIMISER:
            parts["parameters"] += life.n_bytes
        # the head's result, or later tensors with as many columns or as many elements
        elif (
            head is not None
            and life.order >= head.order
            and (life.shape[-1:] == head.shape[-1:] or prod(life.shape) == prod(head.shape))
        ):
            parts["head"] += life.n_bytes
        elif life.name == BATCH:
            parts["saved"] += life.n_bytes
        else:
            groups[life.fqn, life.shape] += life.n_bytes
    parts["tensor"] = max(groups.values(), default=0)
    parts["saved"] += sum(groups.values()) - parts["tensor"]
    return parts
