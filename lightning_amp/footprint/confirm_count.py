"""Compare the first real step with the count that its plan was made by: storages in the order of making, and the peak.

Of an operator, the storages that it makes are compared, with module, shape and bytes; views, operators that write to
what exists, and small storages are not. So it is harmless that a count calls `lift_fresh` or `detach` where a real step
does not. A layout that differs shows in the copies that later operators make of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_amp.data.batch import dense_parts, parts_in, tensors_in
from lightning_amp.footprint.module_profile import BACKWARD, GRADIENTS, Life
from lightning_amp.quantities import format_bytes

SMALL = 1 / 1000
"""Share of the peak below which a storage is not compared."""
MATTERS = 0.01
"""Share of the predicted peak by which a real one has to differ to be told."""
Shape = tuple[int, ...]


class Made(NamedTuple):
    """A storage that a step makes."""

    name: str
    fqn: str
    shape: Shape
    n_bytes: int

    def __str__(self) -> str:
        at = f" of {self.fqn}" if self.fqn else ""
        return f"{self.name} {list(self.shape)}{at}, {format_bytes(self.n_bytes)}"


class StepMakes(NamedTuple):
    """What the forward and backward passes of a step make, for a batch of some shapes."""

    batch: tuple[Shape, ...]
    made: tuple[Made, ...]

    @classmethod
    def of(cls, batch: Any, lives: Iterable[Life], work: Sequence[tuple[str, str]]) -> "StepMakes":
        """Read a recorded step."""
        # the optimizer's operators follow the last backward pass
        end = max((t for t, (phase, _) in enumerate(work) if phase == BACKWARD), default=len(work) - 1)
        made = (
            Made("gradient" if life.kind == GRADIENTS else life.name, life.fqn, life.shape, life.n_bytes)
            for life in lives
            if 0 < life.birth <= end and life.n_bytes and life.shape
        )
        return cls(tuple(shapes_of(batch)), tuple(made))


def shapes_of(batch: Any) -> list[Shape]:
    """Return the shapes of a batch's tensors, each with the bytes of an element.

    Tensors of objects that Lightning moves to a device by their method `to`, such as graphs, are among them.
    """
    tensors = (one for leaf in parts_in(batch) for one in _tensors_of(leaf, set()))
    parts: Iterable[Tensor] = (p for tensor in tensors for p in dense_parts(tensor) or (tensor,))
    return [(*part.shape, part.element_size()) for part in parts]


def _tensors_of(leaf: object, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of a leaf of a batch, and those that the attributes of an object hold."""
    here = list(tensors_in(leaf))
    yield from here
    if here or id(leaf) in seen or isinstance(leaf, nn.Module) or not callable(getattr(leaf, "to", None)):
        return
    seen.add(id(leaf))
    for part in parts_in(getattr(leaf, "__dict__", {})):
        yield from _tensors_of(part, seen)


def difference(counted: StepMakes, real: StepMakes, *, predicted: int, measured: int) -> str:
    """Return in words how a real step differs from the counted one; "" if it does not matter, or for other batches."""
    if counted.batch != real.batch or abs(measured - predicted) <= MATTERS * predicted:
        return ""
    said = (
        f"the first real step takes {format_bytes(measured)}, and {format_bytes(predicted)} were counted for its plan"
        f" ({100 * (measured / max(1, predicted) - 1):+.0f} %)"
    )
    least = SMALL * predicted
    pairs = zip_longest(*([one for one in step.made if one.n_bytes >= least] for step in (counted, real)))
    for one, other in pairs:
        if one is None or other is None or not _alike(one, other):
            nothing = "nothing more"
            return f"{said}; they differ first where the step makes {other or nothing}, and the count {one or nothing}"
    return f"{said}; its operators make the same storages, which live longer or shorter"


def _alike(one: Made, other: Made) -> bool:
    # the name of what accumulates into a gradient depends on when the gradient was looked at
    named = "gradient" in (one.name, other.name) or one.name == other.name
    return named and (one.fqn, one.shape, one.n_bytes) == (other.fqn, other.shape, other.n_bytes)
