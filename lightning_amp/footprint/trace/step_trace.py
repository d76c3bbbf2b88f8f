"""The storages of a counted step in the order of its operators, and the bytes that a device reserves for them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_amp.footprint.module_profile import ACTIVATIONS, BATCH, GRADIENTS, OPTIMISER, PARAMETERS, STATE, Life
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings
from lightning_amp.footprint.trace.caching_allocator import Block, CachingAllocator

STEPS = 3
"""Steps after which an allocator reserves no more, as a rule: the first has no optimizer state before its end."""


@dataclass(frozen=True, slots=True)
class Event:
    """A storage is made, or released, at an operator of the step."""

    at: int
    life: Life
    made: bool


class Place(NamedTuple):
    """Where a module's `forward` is defined, and the name of its class."""

    file: str
    line: int
    kind: str


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A step: what is alive when, and what runs.

    Attributes:
        lives: Storages. Those that exist before the step are born at operator 0; those that outlive it do not die.
        work: Phase and module of every operator.
        operators: Names of the operators; the first stands for all storages from before the step.
        places: Where modules are defined, by name; empty if it is not known.
    """

    lives: Sequence[Life]
    work: Sequence[tuple[str, str]]
    operators: Sequence[str] = ()
    places: Mapping[str, Place] = field(default_factory=dict)

    def events(self) -> Iterator[Event]:
        """Yield what happens to storages after the step has begun; results are made before arguments are released."""
        made: dict[int, list[Life]] = defaultdict(list)
        released: dict[int, list[Life]] = defaultdict(list)
        for life in self.lives:
            if not life.n_bytes:
                continue
            if life.birth:
                made[life.birth].append(life)
            if life.death is not None:
                released[life.death].append(life)
        for at in range(len(self.work)):
            yield from (Event(at, life, True) for life in made[at])
            yield from (Event(at, life, False) for life in released[at])

    @property
    def before(self) -> list[Life]:
        """Storages that exist before the step."""
        return [life for life in self.lives if life.n_bytes and not life.birth]

    def replayed(
        self, allocator: CachingAllocator, *, workspaces: Sequence[int] = ()
    ) -> Iterator[tuple[int, Event, Block]]:
        """Run the step `STEPS` times in an allocator; yield number of the step, event and block.

        Parameters come first. Optimizer state is made by the first step's update, at its place between what else is
        alive then. What a step leaves is what the next one begins with: gradients and state by name. The batch is a
        new one.

        Args:
            workspaces: Bytes that libraries allocate first, and keep.

        Raises:
            DeviceFullError: The allocator's device is full.
        """
        for n_bytes in workspaces:
            allocator.allocate(n_bytes)
        first = [life for life in self.before if _is_before_training(life)]
        held = {id(life): allocator.allocate(life.n_bytes) for life in first}
        for life in first:
            yield 0, Event(0, life, True), held[id(life)]
        state = [life for life in self.before if life.kind == STATE]
        updates = next((at for at, (phase, _) in enumerate(self.work) if phase == OPTIMISER), len(self.work))
        for step in range(STEPS):
            if step:
                yield from ((step, *done) for done in self._begun(allocator, held))
            for event in self.events():
                if not step and state and event.at >= updates:
                    yield from _made(state, updates, allocator, held)
                    state = []
                key = id(event.life)
                if event.made:
                    held[key] = allocator.allocate(event.life.n_bytes)
                    yield step, event, held[key]
                elif key in held:
                    # the first step does not have what another one leaves to it
                    block = held.pop(key)
                    yield step, event, block
                    allocator.release(block)
            if state:
                yield from _made(state, len(self.work) - 1, allocator, held)
                state = []

    def _begun(self, allocator: CachingAllocator, held: dict[int, Block]) -> Iterator[tuple[Event, Block]]:
        """Name what is alive after a step as what the next step begins with; release or allocate the rest."""
        left: dict[tuple[str, int], list[Life]] = defaultdict(list)
        for life in self.lives:
            if life.birth and id(life) in held:
                left[life.name, life.n_bytes].append(life)
        for life in self.before:
            if id(life) in held:
                continue
            same = left[life.name, life.n_bytes] if life.kind != ACTIVATIONS else []
            if same:
                held[id(life)] = held.pop(id(same.pop()))
            else:
                held[id(life)] = allocator.allocate(life.n_bytes)
                yield Event(0, life, True), held[id(life)]
        for life in (life for lives in left.values() for life in lives):
            block = held.pop(id(life))
            yield Event(0, life, False), block
            allocator.release(block)

    def reserved_by(
        self, settings: AllocatorSettings, *, workspaces: Sequence[int] = (), capacity: int | None = None
    ) -> CachingAllocator:
        """Return an allocator after the steps; its `peak_reserved` has the most bytes that a device reserves.

        Args:
            settings: Settings of the allocator.
            workspaces: As in `replayed`.
            capacity: Bytes that may be reserved; None for no limit.

        Raises:
            DeviceFullError: A step does not fit.
        """
        allocator = CachingAllocator(settings, capacity=capacity)
        for _ in self.replayed(allocator, workspaces=workspaces):
            pass
        return allocator


def _is_before_training(life: Life) -> bool:
    """Whether a storage from before the step exists before the first step too: also gradients that it adds to."""
    return life.kind == PARAMETERS or life.name == BATCH or (life.kind == GRADIENTS and life.death is None)


def _made(
    state: Sequence[Life], at: int, allocator: CachingAllocator, held: dict[int, Block]
) -> Iterator[tuple[int, Event, Block]]:
    for life in state:
        held[id(life)] = allocator.allocate(life.n_bytes)
        yield 0, Event(at, life, True), held[id(life)]
