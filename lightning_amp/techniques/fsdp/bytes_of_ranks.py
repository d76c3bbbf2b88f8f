"""Predict the peak bytes of a rank whose parameters, gradients and optimiser state are split by torch's FSDP2.

A step on one device is walked through once more, with activations and temporaries as they are, and of a rank

    always      its rows of parameters and optimiser state, padded to ceil(rows / R), and buffers
    root        its parameters whole, from the step's beginning to the end of backward, and there its gradients too
    forward     the unit at work: its parameters whole, and once more as they were received, until the next unit's are
    backward    the unit at work: its parameters whole, its gradients as they come; the parameters of the unit before
                it, received ahead; what the unit after it has sent of its gradients, until this one sends
    its end     gradients whole, and once more as they are sent; then as they are sent, received, and summed
    after it    its rows of the sum

With rows in the host's memory a device has none of these rows, but while a unit is gathered its own, on their way, and
of gradients the rows of the sum until they are sent back.

Where batches add up their gradients, rows of all of them are there throughout, and a unit's rows of this batch are
added to its own as soon as they are summed.

A unit whose inputs have no gradient, the first one, is notified of the end of its backward pass when the module's ends.
These are the tensors of torch 2.13 on a CPU with the collectives of techniques/fsdp/parameters.py.

Known limits: a unit that is called more than once counts as one call; in manual optimisation the root's parameters are
gathered again for the optimiser's step, which is not counted; on a GPU the unit after the one at work is gathered while
it works; bytes of a GPU were not compared with a meter.

Legend: R ranks among which parameters are split; a unit is what is gathered together, a block or the rest of the module
("").
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from lightning_amp.footprint.module_profile import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OPTIMISER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    ModuleProfile,
    Moment,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter: its name in the module, whole shape, bytes of an entry, and whether it has a gradient."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    trained: bool = True

    @property
    def whole_bytes(self) -> int:
        """Of all entries."""
        return self.item_bytes * prod(self.shape)

    def shard_bytes(self, ranks: int) -> int:
        """Of one rank's rows, those that the first rank has: ceil(rows / R)."""
        rows = -(-self.shape[0] // ranks)
        return self.item_bytes * rows * prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUnit:
    """Parameters that are gathered together: of the block `fqn`, or with "" of all that is in no block."""

    fqn: str
    parameters: tuple[ParameterShape, ...]

    def whole_bytes(self, *, trained: bool = False) -> int:
        """Of its parameters, or of their gradients."""
        return sum(p.whole_bytes for p in self.parameters if p.trained or not trained)

    def shard_bytes(self, ranks: int, *, trained: bool = False) -> int:
        """Of one rank's rows of its parameters, or of their gradients."""
        return sum(p.shard_bytes(ranks) for p in self.parameters if p.trained or not trained)


def fsdp_peak_bytes(
    profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, offload: bool = False
) -> int:
    """Most bytes that a rank's device has at once in a training step, the second one.

    Args:
        profile: Of the rank's own batch, on one device.
        units: All of them, the root last; techniques/fsdp/look.py reads them from a module.
        ranks: Among which parameters are split, 2 or more.
        offload: Whether a rank's rows lie in a memory that is not the device's.
    """
    assert ranks >= 2, f"parameters are split over 2 ranks or more, got {ranks!r}"
    walk = _FsdpWalk(profile, units, ranks, offload=offload)
    return max(*walk.forward(), *walk.backward(), *walk.optimiser(), 0) + profile.left_bytes


def fsdp_held_bytes(
    profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, offload: bool = False
) -> int:
    """What a rank's device keeps for the next step: its rows of parameters, gradients and optimiser state, and buffers.

    Arguments as of `fsdp_peak_bytes`.
    """
    return _FsdpWalk(profile, units, ranks, offload=offload).held()


class _FsdpWalk:
    """One walk through a step: bytes alive at its moments, and between them where FSDP itself has more."""

    def __init__(self, profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, offload: bool) -> None:
        self._timeline, self._ranks, self._offload = profile.timeline, ranks, offload
        self._units = {unit.fqn: unit for unit in units}
        self._whole = {fqn: unit.whole_bytes(trained=True) for fqn, unit in self._units.items()}
        # as they are gathered, and as gradients are sent: R parts of equal size
        self._padded = {fqn: ranks * unit.shard_bytes(ranks) for fqn, unit in self._units.items()}
        self._sent = {fqn: ranks * unit.shard_bytes(ranks, trained=True) for fqn, unit in self._units.items()}
        whole = sum(unit.whole_bytes() for unit in units)
        self._buffers = profile.timeline[0].by_kind[PARAMETERS] - whole
        self._rows = 0 if offload else sum(self._padded.values()) // ranks
        # Rows of state and of old gradients are padded as those that are sent: their share of what one device has of
        # both.
        self._part = 0.0 if offload else sum(self._sent.values()) / ranks / max(1, sum(self._whole.values()))
        # such as how many steps were taken: numbers that have no rows
        self._numbers = sum(t.n_bytes for t in profile.tensors if t.kind == STATE and not t.shape)
        self._added = 0 < sum(self._whole.values()) <= profile.added_bytes
        # units in the order of the forward pass
        seen = (self._unit_of(moment) for moment in self._timeline if moment.phase == FORWARD)
        self._order = [fqn for fqn in dict.fromkeys(seen) if fqn]

    def held(self) -> int:
        """Between steps."""
        last = self._timeline[-1]
        return self._held(last) + self._share(last, GRADIENTS)

    def forward(self) -> Iterator[int]:
        """The forward pass, with the last step's gradients until they are dropped."""
        received, last = 0, ""
        yield self._buffers + 2 * self._padded[""] + self._on_its_way("")
        for moment in self._of(FORWARD):
            unit = self._unit_of(moment)
            held = self._held(moment) + self._other(moment) + self._share(moment, GRADIENTS) + self._padded[""]
            if unit and unit != last:
                # what was received before is let go of only when this is in its place
                yield held + received + 2 * self._padded[unit] + self._on_its_way(unit)
                received = self._padded[unit]
            yield held + received + (self._padded[unit] if unit else 0)
            last = unit

    def backward(self) -> Iterator[int]:
        """The backward pass, at the end of which the root's gradients and the first unit's are reduced."""
        pending, done = list(self._order), {"whole": 0, "rows": 0, "sent": 0}
        unit, at, root, worked = "", 0, 0, set[str]()
        for moment in self._of(BACKWARD):
            now = self._unit_of(moment)
            if now and now != unit:
                if unit in pending:
                    yield from self._finish(unit, at + self._padded[""] + root + self._ahead(unit), done)
                    pending.remove(unit)
                unit = now
            at = self._held(moment) + self._other(moment)
            worked.add(moment.fqn)
            # gradients that the profile has by now, less those of units that have reduced theirs
            # The profile of one device keeps all gradients to the end. What units have reduced by now is rows here.
            come = moment.by_kind[GRADIENTS] - done["whole"] - root
            if self._added:
                at += sum(self._sent.values()) // self._ranks * (not self._offload)
                own = self._units[""].parameters
                of_root = sum(p.whole_bytes for p in own if p.trained and p.name.rpartition(".")[0] in worked)
                come = self._whole[now] if now else of_root - root
            if now:
                come = min(max(0, come), self._whole[now])
            else:
                root, come = min(max(0, root + come), self._whole[""]), 0
            gathered = self._padded[unit] + self._ahead(unit) if unit in pending else 0
            yield at + self._padded[""] + root + gathered + come + done["rows"] + done["sent"]
        # the root is notified first
        gathered = self._padded[unit] + self._whole[unit] if unit in pending else 0
        yield from self._finish("", at + gathered, done)
        if unit in pending:
            yield from self._finish(unit, at, done)

    def optimiser(self) -> Iterator[int]:
        """The optimiser's step on the rows, with temporaries of rows."""
        for moment in self._of(OPTIMISER):
            shared = self._share(moment, GRADIENTS) + self._share(moment, TEMPORARIES)
            yield self._held(moment) + shared + moment.by_kind[ACTIVATIONS]

    def _finish(self, fqn: str, beside: int, done: dict[str, int]) -> Iterator[int]:
        """A unit lets go of its parameters and reduces its gradients; `beside` is all but what `done` counts."""
        sent, beside = self._sent[fqn], beside + done["rows"]
        yield beside + self._whole[fqn] + sent
        yield beside + 2 * sent + sent // self._ranks
        done["whole"] += self._whole[fqn]
        done["rows"] += 0 if self._offload or self._added else sent // self._ranks
        done["sent"] = sent

    def _ahead(self, fqn: str) -> int:
        """What is received ahead while a unit works in the backward pass: the unit that comes next there."""
        place = self._order.index(fqn) if fqn in self._order else 0
        return self._padded[self._order[place - 1]] if place else 0

    def _on_its_way(self, fqn: str) -> int:
        """A unit's rows on the device while it is gathered, where they lie elsewhere."""
        return self._padded[fqn] // self._ranks if self._offload else 0

    def _of(self, phase: str) -> list[Moment]:
        return [moment for moment in self._timeline if moment.phase == phase]

    def _unit_of(self, moment: Moment) -> str:
        """The unit that a moment's module lies in, "" for the root."""
        name = moment.fqn
        while name and name not in self._units:
            name = name.rpartition(".")[0]
        return name

    def _held(self, moment: Moment) -> int:
        numbers = min(self._numbers, moment.by_kind[STATE]) * (not self._offload)
        return self._rows + self._buffers + numbers + self._share(moment, STATE, but=numbers)

    def _share(self, moment: Moment, kind: str, *, but: int = 0) -> int:
        """The rows' part of what has the shape of parameters, of some kind but for so many bytes."""
        return round((moment.by_kind[kind] - but) * self._part)

    @staticmethod
    def _other(moment: Moment) -> int:
        return moment.by_kind[ACTIVATIONS] + moment.by_kind[TEMPORARIES]
