"""Summarise creations and releases of storages as a ModuleProfile.

The clock counts operators. A storage is alive at t if it was born at or before the t-th operator and had not died
before that operator's results were counted; bytes over time are a running sum of births and deaths.

    kind               counts
    parameters         parameters and buffers
    gradients          of parameters
    optimiser state    what the optimiser keeps between steps
    activations        the batch, and what a forward pass made that is alive when the next backward pass begins
    temporaries        all else
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from lightning_amp.footprint.module_profile import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    HELD,
    KINDS,
    OPTIMISER,
    PARTS,
    TEMPORARIES,
    ModuleBytes,
    ModuleProfile,
    Moment,
    TensorBytes,
)


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
    by_kind = _bytes_over_time(lives, len(work))
    at = int(np.argmax(by_kind.sum(0)))
    alive = (v for v in lives if v.n_bytes and v.birth <= at and (v.death is None or v.death >= at))
    peak = sorted(alive, key=lambda life: -life.n_bytes)
    parts = _parts(peak, work, head)
    return ModuleProfile(
        peak_bytes=int(by_kind[:, at].sum()),
        largest=max(PARTS, key=parts.__getitem__),
        parts=parts,
        by_kind=_row(by_kind, at),
        peak_phase=work[at][0],
        peak_module=work[at][1],
        modules=_modules(peak),
        tensors=tuple(
            TensorBytes(name=v.name, fqn=v.fqn, kind=v.kind, shape=v.shape, dtype=v.dtype, n_bytes=v.n_bytes)
            for v in peak
        ),
        timeline=_timeline(by_kind, work),
        added_bytes=_added(by_kind, work),
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


def _bytes_over_time(lives: Iterable[Life], length: int) -> Any:
    """Bytes alive by kind at every operator, int64 [kind, operator]."""
    change = np.zeros((len(KINDS), length + 1), dtype=np.int64)
    for life in lives:
        row = KINDS.index(life.kind)
        change[row, life.birth] += life.n_bytes
        change[row, length if life.death is None else min(life.death + 1, length)] -= life.n_bytes
    return change.cumsum(1)[:, :length]


def _row(by_kind: Any, at: int) -> dict[str, int]:
    return {kind: int(n) for kind, n in zip(KINDS, by_kind[:, at], strict=True)}


def _parts(peak: Iterable[Life], work: Sequence[tuple[str, str]], head: Head | None) -> dict[str, int]:
    """The peak by what would make it smaller; see ModuleProfile."""
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    groups: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for life in peak:
        if life.kind in HELD or work[life.birth][0] == OPTIMISER:
            parts["parameters"] += life.n_bytes
        elif head is not None and _of_head(life, head):
            parts["head"] += life.n_bytes
        elif life.name == "batch":
            parts["saved"] += life.n_bytes
        else:
            groups[life.fqn, life.shape] += life.n_bytes
    parts["tensor"] = max(groups.values(), default=0)
    parts["saved"] += sum(groups.values()) - parts["tensor"]
    return parts


def _of_head(life: Life, head: Head) -> bool:
    """Whether a tensor is the head's result or was made after it, with as many columns or as many values."""
    alike = life.shape[-1:] == head.shape[-1:] or int(np.prod(life.shape)) == int(np.prod(head.shape))
    return life.order >= head.order and alike


def _modules(peak: Iterable[Life]) -> tuple[ModuleBytes, ...]:
    found: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for life in peak:
        found[life.fqn][life.kind] += life.n_bytes
    rows = [ModuleBytes(fqn=fqn, n_bytes=sum(kinds.values()), by_kind=kinds) for fqn, kinds in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.n_bytes, row.fqn)))


def _added(by_kind: Any, work: Sequence[tuple[str, str]]) -> int:
    begins = next((t for t, (phase, _) in enumerate(work) if phase == BACKWARD), None)
    return 0 if begins is None else int(by_kind[KINDS.index(GRADIENTS), begins])


def _timeline(by_kind: Any, work: Sequence[tuple[str, str]]) -> tuple[Moment, ...]:
    total, moments = by_kind.sum(0), []
    for (phase, fqn), grouped in groupby(range(len(work)), key=work.__getitem__):
        stretch = list(grouped)
        most = max(stretch, key=total.__getitem__)
        moments.append(Moment(phase=phase, fqn=fqn, by_kind=_row(by_kind, most), n_operators=len(stretch)))
    return tuple(moments)
