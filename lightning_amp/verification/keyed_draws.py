"""Random numbers of a training step: seen where they are drawn, and on request made a function of the cell.

A rank that draws for its own cells from torch's default generator does not draw what one process draws for the same
cells. While `KeyedDraws` is active, a draw with an axis of cells is made cell by cell, each from its own seed

    seed = hash(place in the code, how often it was reached, the cell's row in the global batch)

so that errors that come from the draws vanish, whatever is drawn. Draws without an axis of cells are left alone: the
generators of all ranks start alike, and these draws consume them alike.

A backward pass that computes parts of the forward pass again draws for each module what it has drawn before.

Known limits: draws of numpy and python, permutations of cells, attention with dropout inside one operator, and those of
a module that runs several times in a step and is computed again, are not made equal; the axis of cells is the first
that is as long as the rank's part of the batch.
"""

import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import TorchDispatchMode

OWN = Path(__file__).parents[1]
NOT_THE_USERS = tuple(
    map(str, (Path(torch.__file__).parent, *(OWN / n for n in ("verification", "parallel", "footprint"))))
)
"""Folders of code between the user's line and the draw."""


class KeyedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every draw of torch's generators while active.

    Attributes:
        sites: Places where numbers were drawn for cells, in order.
    """

    def __init__(
        self,
        starts: Mapping[int, int],
        module_now: Callable[[], str],
        *,
        native: Collection[str] | None = None,
    ) -> None:
        """Start watching; see `Recorder`. `module_now` names the module whose forward is running."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites: list[str] = []
        self._starts, self._module_now, self._native = starts, module_now, native
        self._reached: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in func._opname:
            return func(*args, **kwargs)
        axis = self._axis(args)
        if axis is None:
            return func(*args, **kwargs)
        site = self._site(func)
        if site not in self.sites:
            self.sites.append(site)
        if self._native is None or site in self._native:
            return func(*args, **kwargs)
        # from the default generator, in place of which None stands: some overloads have no default for this argument
        args = [_not_a_generator(value) for value in args]
        kwargs = {name: _not_a_generator(value) for name, value in kwargs.items()}
        return self._draw(func, args, kwargs, site=site, axis=axis)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw from the beginning again, and go on where it was before."""
        reached, self._reached = self._reached, Counter()
        try:
            yield
        finally:
            self._reached = reached

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, site: str, axis: int) -> Any:
        n = _shape(args)[axis]
        self._reached[site] += 1
        key = f"{site} {self._reached[site]}"
        state = torch.get_rng_state()
        rows = []
        for i in range(n):
            torch.default_generator.manual_seed(zlib.crc32(f"{key} {self._starts[n] + i}".encode()))
            rows.append(func(*(_row(value, axis, i, n) for value in args), **kwargs))
        torch.set_rng_state(state)
        return args[0] if func._schema.is_mutable else torch.cat(rows, dim=axis)

    def _axis(self, args: Sequence[Any]) -> int | None:
        return next((axis for axis, n in enumerate(_shape(args)) if n in self._starts), None)

    def _site(self, func: Any) -> str:
        module, line = self._module_now() or "training_step", next(_frames(), "")
        return f"{module}, {func._opname.strip('_')} in {line}"


def _frames() -> Iterator[str]:
    """Lines of the user's own code that are being run, the innermost first."""
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if not name.startswith((*NOT_THE_USERS, "<frozen")):
            yield f"{Path(name).name}:{line}"


def _shape(args: Sequence[Any]) -> Sequence[int]:
    """Of what is drawn: that of the first tensor, else the first list of sizes."""
    for value in args:
        if isinstance(value, Tensor):
            return value.shape
        if isinstance(value, list | tuple):
            return value
    return ()


def _not_a_generator(value: Any) -> Any:
    return None if isinstance(value, torch.Generator) else value


def _row(value: Any, axis: int, i: int, n: int) -> Any:
    """What one cell's draw is given."""
    if isinstance(value, Tensor) and axis < value.dim() and value.shape[axis] == n:
        return value.narrow(axis, i, 1)
    if isinstance(value, list | tuple) and axis < len(value) and value[axis] == n:
        return [1 if at == axis else size for at, size in enumerate(value)]
    return value
