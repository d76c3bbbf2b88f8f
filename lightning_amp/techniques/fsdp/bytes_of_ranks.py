"""Predict the peak bytes of a rank whose parameters, gradients and optimiser state are sharded by torch's FSDP2.

The profile of a step on one device is replayed. Activations and temporaries stay as they are, and a rank has

    always      its rows of parameters and optimiser state, padded to ceil(rows / R), and buffers
    root        its full parameters, from the start of the step to the end of backward, and then also its gradients
    forward     the current unit: its full parameters, twice until the next unit's parameters are received (the receive
                buffer and the parameters)
    backward    the current unit: its full parameters, and its gradients as they are computed; prefetched parameters of
                the unit before it; the sent gradients of the unit after it, until this unit sends
    its end     full gradients, and their send buffer; then the buffers of sent, received and reduced gradients
    after it    its rows of the reduced gradients

With rows in host memory, the device has none of these rows, except those of a unit while it is gathered, and the rows
of reduced gradients until they are copied to the host. One rank has all rows there; it copies them without a receive
buffer, one parameter after the other.

When gradients are accumulated over batches, their rows exist throughout, and a unit's rows of this batch are added to
them as soon as they are reduced.

For a unit whose inputs have no gradient, such as the first one, the backward pass ends with that of the module.
These are the tensors of torch 2.13 on a CPU with the collectives of techniques/fsdp/parameters.py.

Known limits: a unit that is called several times counts as one call. In manual optimisation the root's parameters are
gathered again for the optimiser's step, which is not counted. On a GPU the next unit is gathered while the current one
runs. Bytes of a GPU were not compared with measurements.

Legend: R ranks over which parameters are sharded; a unit is gathered together: a block, or the rest of the module ("").
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

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
from lightning_amp.techniques.host_memory.limit import page_locked


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter: its name in the module, full shape, bytes of an element, and whether it has a gradient."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    trained: bool = True

    @property
    def whole_bytes(self) -> int:
        """Bytes of the full parameter."""
        return self.item_bytes * prod(self.shape)

    def shard_bytes(self, ranks: int) -> int:
        """Bytes of one rank's rows, for the first rank: ceil(rows / R)."""
        rows = -(-self.shape[0] // ranks)
        return self.item_bytes * rows * prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUnit:
    """Parameters that are gathered together: of the block `fqn`, or with "" of everything outside blocks."""

    fqn: str
    parameters: tuple[ParameterShape, ...]

    def whole_bytes(self, *, trained: bool = False) -> int:
        """Bytes of its full parameters, or with `trained` of their gradients."""
        return sum(p.whole_bytes for p in self.parameters if p.trained or not trained)

    def shard_bytes(self, ranks: int, *, trained: bool = False) -> int:
        """Bytes of one rank's rows of its parameters, or with `trained` of their gradients."""
        return sum(p.shard_bytes(ranks) for p in self.parameters if p.trained or not trained)


def fsdp_peak_bytes(
    profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, offload: bool = False
) -> int:
    """Peak bytes of a rank's device in a training step, the second one.

    Args:
        profile: Profile of a step with the rank's batch, on one device.
        units: All units, the root last; techniques/fsdp/look.py computes them for a module.
        ranks: Ranks over which parameters are sharded.
        offload: Whether a rank's rows lie in host memory, apart from the device's.
    """
    found = fsdp_bytes(profile, units, ranks, offload=offload)
    return max(found.passes, found.update)


class RankBytes(NamedTuple):
    """Bytes of a rank's device in a training step.

    Attributes:
        passes, update: Peak in the passes, and in the optimiser's step.
        beyond: Most bytes that it has beyond one device, mostly below 0, while a module runs, by phase and name.
    """

    passes: int
    update: int
    beyond: dict[str, int]


def fsdp_bytes(
    profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, offload: bool = False
) -> RankBytes:
    """Predict the bytes of a rank; the arguments are those of `fsdp_peak_bytes`."""
    walk = _FsdpWalk(profile, units, ranks, offload=offload)
    peak, beyond = 0, dict[str, int]()
    for moment, n_bytes in walk.passes():
        peak = max(peak, n_bytes)
        more, where = n_bytes - sum(moment.by_kind.values()), f"{moment.phase} {moment.fqn}".rstrip()
        beyond[where] = max(more, beyond.get(where, more))
    update = max(walk.optimiser(), default=0)
    return RankBytes(peak + profile.left_bytes, update + profile.left_bytes, beyond)


def fsdp_held_bytes(
    profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, offload: bool = False
) -> int:
    """Bytes that a rank's device keeps between steps: rows of parameters, gradients and optimiser state, and buffers.

    The arguments are those of `fsdp_peak_bytes`.
    """
    return _FsdpWalk(profile, units, ranks, offload=offload).held()


def fsdp_host_bytes(profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, pinned: bool = False) -> int:
    """Bytes of host memory of a rank whose rows lie there; the arguments are those of `fsdp_peak_bytes`.

    `pinned`: Whether rows of parameters and gradients are page-locked, as for a GPU; state is not.
    """
    walk = _FsdpWalk(profile, units, ranks, offload=False)
    return walk.page_locked_rows() if pinned else walk.rows()


def fsdp_validation_bytes(
    profile: ModuleProfile,
    validation: ModuleProfile,
    units: Sequence[ParameterUnit],
    ranks: int,
    *,
    offload: bool = False,
) -> int:
    """Peak bytes of a rank's device in the validation of a fit, which has the optimiser state of training.

    `validation`: profile of its step on one device; the other arguments are those of `fsdp_peak_bytes`.
    """
    state = _FsdpWalk(profile, units, ranks, offload=offload).state()
    walk = _FsdpWalk(validation, units, ranks, offload=offload)
    return max(n_bytes for _, n_bytes in walk.forward()) + state


class _FsdpWalk:
    """Replay of a step: bytes alive at its moments, and between them where FSDP has more."""

    def __init__(self, profile: ModuleProfile, units: Sequence[ParameterUnit], ranks: int, *, offload: bool) -> None:
        self._timeline, self._ranks, self._offload = profile.timeline, ranks, offload
        self._units = {unit.fqn: unit for unit in units}
        self._whole = {fqn: unit.whole_bytes(trained=True) for fqn, unit in self._units.items()}
        # sizes of gathered parameters, and of sent gradients: R shards of equal size
        self._padded = {fqn: ranks * unit.shard_bytes(ranks) for fqn, unit in self._units.items()}
        self._sent = {fqn: ranks * unit.shard_bytes(ranks, trained=True) for fqn, unit in self._units.items()}
        whole = sum(unit.whole_bytes() for unit in units)
        self._buffers = profile.timeline[0].by_kind[PARAMETERS] - whole
        self._rows = 0 if offload else sum(self._padded.values()) // ranks
        # rows of state and old gradients are padded like those that are sent: as a share of both on one device
        self._part = 0.0 if offload else sum(self._sent.values()) / ranks / max(1, sum(self._whole.values()))
        # scalars such as the number of steps, which are not sharded
        self._numbers = sum(t.n_bytes for t in profile.tensors if t.kind == STATE and not t.shape)
        self._added = 0 < sum(self._whole.values()) <= profile.added_bytes
        # units in the order of the forward pass
        seen = (self._unit_of(moment) for moment in self._timeline if moment.phase == FORWARD)
        self._order = [fqn for fqn in dict.fromkeys(seen) if fqn]

    def held(self) -> int:
        """Bytes between steps."""
        last = self._timeline[-1]
        return self._held(last) + self._share(last, GRADIENTS)

    def rows(self) -> int:
        """Bytes of a rank's rows of parameters, gradients and optimiser state, in the optimiser's step."""
        return max(
            self._rows + self._share(moment, GRADIENTS) + self._share(moment, STATE)
            for moment in (*self._of(OPTIMISER), self._timeline[-1])
        )

    def page_locked_rows(self) -> int:
        """The same where rows of parameters and gradients are page-locked, each of them by itself."""
        every = (parameter for unit in self._units.values() for parameter in unit.parameters)
        rows = sum(page_locked(one.shard_bytes(self._ranks)) * (2 if one.trained else 1) for one in every)
        return rows + self._share(self._timeline[-1], STATE)

    def state(self) -> int:
        """Bytes of the optimiser's state between steps."""
        return self._held(self._timeline[-1]) - self._rows - self._buffers

    def passes(self) -> Iterator[tuple[Moment, int]]:
        """Bytes during both passes."""
        yield from self.forward()
        yield from self.backward()

    def forward(self) -> Iterator[tuple[Moment, int]]:
        """Bytes during the forward pass, with the last step's gradients until they are freed."""
        # buffers of received parameters, beside the parameters
        received, last, buffers = 0, "", self._ranks > 1
        for n, moment in enumerate(self._of(FORWARD)):
            if n == 0:
                yield moment, self._buffers + (1 + buffers) * self._padded[""] + self._on_its_way("")
            unit = self._unit_of(moment)
            held = self._held(moment) + self._other(moment) + self._share(moment, GRADIENTS) + self._padded[""]
            if unit and unit != last:
                # the previous receive buffer is freed once this one is allocated
                yield moment, held + received + (1 + buffers) * self._padded[unit] + self._on_its_way(unit)
                received = buffers * self._padded[unit]
            yield moment, held + received + (self._padded[unit] if unit else 0)
            last = unit

    def backward(self) -> Iterator[tuple[Moment, int]]:
        """Bytes during the backward pass, at the end of which the root's and the first unit's gradients are reduced."""
        pending, done = list(self._order), {"whole": 0, "rows": 0, "sent": 0}
        unit, at, root, worked, moment = "", 0, 0, set[str](), self._timeline[-1]
        for moment in self._of(BACKWARD):
            now = self._unit_of(moment)
            if now and now != unit:
                if unit in pending:
                    others = at + self._padded[""] + root + self._ahead(unit)
                    yield from ((moment, n_bytes) for n_bytes in self._finish(unit, others, done))
                    pending.remove(unit)
                unit = now
            at = self._held(moment) + self._other(moment)
            worked.add(moment.fqn)
            # Gradients in the profile so far, minus those of units that have reduced theirs: on one device gradients
            # stay until the end, and here a finished unit has only rows.
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
            yield moment, at + self._padded[""] + root + gathered + come + done["rows"] + done["sent"]
        # the backward pass of the root ends first
        gathered = self._padded[unit] + self._whole[unit] if unit in pending else 0
        yield from ((moment, n_bytes) for n_bytes in self._finish("", at + gathered, done))
        if unit in pending:
            yield from ((moment, n_bytes) for n_bytes in self._finish(unit, at, done))

    def optimiser(self) -> Iterator[int]:
        """Bytes during the optimiser's step on the rows, with temporaries of the size of rows."""
        for moment in self._of(OPTIMISER):
            shared = self._share(moment, GRADIENTS) + self._share(moment, TEMPORARIES)
            yield self._held(moment) + shared + moment.by_kind[ACTIVATIONS]

    def _finish(self, fqn: str, others: int, done: dict[str, int]) -> Iterator[int]:
        """Free a unit's parameters and reduce its gradients; `others` is everything that `done` does not count."""
        sent, others = self._sent[fqn], others + done["rows"]
        yield others + self._whole[fqn] + sent
        yield others + (1 + (self._ranks > 1)) * sent + sent // self._ranks
        done["whole"] += self._whole[fqn]
        done["rows"] += 0 if self._offload or self._added else sent // self._ranks
        done["sent"] = sent

    def _ahead(self, fqn: str) -> int:
        """Bytes that are prefetched while a unit runs backward: those of the next unit there, from other ranks."""
        if self._ranks == 1:
            return 0
        place = self._order.index(fqn) if fqn in self._order else 0
        return self._padded[self._order[place - 1]] if place else 0

    def _on_its_way(self, fqn: str) -> int:
        """Bytes of a unit's rows on the device while it is gathered, with offload."""
        if not self._offload:
            return 0
        if self._ranks == 1:
            return max((p.whole_bytes for p in self._units[fqn].parameters), default=0)
        return self._padded[fqn] // self._ranks

    def _of(self, phase: str) -> list[Moment]:
        return [moment for moment in self._timeline if moment.phase == phase]

    def _unit_of(self, moment: Moment) -> str:
        """Return the unit that contains a moment's module, "" for the root."""
        name = moment.fqn
        while name and name not in self._units:
            name = name.rpartition(".")[0]
        return name

    def _held(self, moment: Moment) -> int:
        numbers = min(self._numbers, moment.by_kind[STATE]) * (not self._offload)
        return self._rows + self._buffers + numbers + self._share(moment, STATE, but=numbers)

    def _share(self, moment: Moment, kind: str, *, but: int = 0) -> int:
        """A rank's share of bytes of a kind with the shape of parameters, without `but` bytes."""
        return round((moment.by_kind[kind] - but) * self._part)

    @staticmethod
    def _other(moment: Moment) -> int:
        return moment.by_kind[ACTIVATIONS] + moment.by_kind[TEMPORARIES]
