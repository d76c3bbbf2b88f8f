"""The storages of a counted step in the order of its operators, and the bytes that a device reserves for them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_amp.footprint.module_profile import ACTIVATIONS, Life
from lightning_amp.footprint.trace.caching_allocator import Block, CachingAllocator

STEPS = 3
"""Steps after which an allocator reserves no more, as a rule: the first begins without free blocks."""


@dataclass(frozen=True, slots=True)
class Event:
    """A storage is made, or released, at an operator of the step."""

    at: int
    life: Life
    made: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A step: what is alive when, and what runs.

    Attributes:
        lives: Storages. Those that exist before the step are born at operator 0; those that outlive it do not die.
        work: Phase and module of every operator.
    """

    lives: Sequence[Life]
    work: Sequence[tuple[str, str]]

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

    def replayed(self, allocator: CachingAllocator) -> Iterator[tuple[int, Event, Block]]:
        """Run the step `STEPS` times in an allocator; yield number of the step, event and block.

        What a step leaves is what the next one begins with: gradients and state by name. The batch is a new one.
        """
        held = {id(life): allocator.allocate(life.n_bytes) for life in self.before}
        for life in self.before:
            yield 0, Event(0, life, True), held[id(life)]
        for step in range(STEPS):
            if step:
                yield from ((step, *done) for done in self._begun(allocator, held))
            for event in self.events():
                key = id(event.life)
                if event.made:
                    held[key] = allocator.allocate(event.life.n_bytes)
                    yield step, event, held[key]
                else:
                    block = held.pop(key)
                    yield step, event, block
                    allocator.release(block)

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
