"""What every module makes of every cell, in two numbers per cell: enough to find where ranks start to differ.

    print(y) = (<y, cos(1..n)>, ||y||)      of the row of one cell, in double precision

A module whose print differs though the prints of its inputs agree is where a difference starts. Only tensors whose
first axis is the rank's cells are looked at, in the first call of a module, and nothing inside a decomposed decoder,
whose parts differ between ranks by design.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_amp.data.batch_parts import tensors_in
from lightning_amp.techniques.contract.protocol import is_decomposed
from lightning_amp.verification.tolerances import FLOOR


@dataclass(frozen=True, slots=True)
class Call:
    """First call of a module.

    Attributes:
        read, made: Prints of its inputs and outputs, [cell, 2] each, with the number of their first cell.
    """

    read: list[tuple[int, Tensor]]
    made: list[tuple[int, Tensor]]


Calls = dict[str, Call]


class Trace:
    """Follows the modules while a training step runs.

    Attributes:
        calls: Name of a module -> its first call, in the order in which they ended.
    """

    def __init__(self, module: nn.Module) -> None:
        """Know the names of a module as it is trained, with everything installed."""
        self._names = {id(child): name for name, child in module.named_modules()}
        self._kinds = {name: _kind(child).__name__ for name, child in module.named_modules()}
        hidden = [name for name, child in module.named_modules() if is_decomposed(child)]
        self._hidden = tuple(f"{name}." for name in hidden)
        self._running: list[str] = []
        self._starts: Mapping[int, int] = {}
        self.calls: Calls = {}

    def running(self) -> str:
        """Name and class of the module whose forward is running, "" where none is."""
        name = self._running[-1] if self._running else self._called()
        return f"{name} ({self._kinds[name]})" if name else ""

    def _called(self) -> str:
        """Of a forward that nobody's `__call__` runs, as a second pass in backward: the module whose function it is."""
        owners = (id(frame.f_locals.get("self")) for frame, _ in walk_stack(None))
        return next((self._names[owner] for owner in owners if owner in self._names), "")

    @contextmanager
    def follow(self, starts: Mapping[int, int]) -> Iterator[None]:
        """Follow, where number of cells of the rank's part -> its first cell in the global batch."""
        self._starts = starts
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            ):
                stack.callback(handle.remove)
            yield
        self._running.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._running.pop() if self._running else ""
        if name and name not in self.calls and not name.startswith(self._hidden):
            self.calls[name] = Call(self._prints((args, kwargs)), self._prints(output))

    @torch.no_grad()
    def _prints(self, values: Any) -> list[tuple[int, Tensor]]:
        return [
            (self._starts[len(value)], _print(value))
            for value in tensors_in(values)
            if value.dim() and len(value) in self._starts and value.is_floating_point()
        ]


def _kind(module: nn.Module) -> type:
    """A module's class; torch's fully_shard has put one of its own in front."""
    return type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)


def _print(value: Tensor) -> Tensor:
    rows = value.detach().reshape(len(value), -1).double()
    weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).cos_()
    return torch.stack([rows @ weights, rows.norm(dim=1)], dim=1)


def output_errors(found: Calls, one: Calls) -> dict[str, float]:
    """Relative error of what every module makes of the rank's cells, as far as both sides show it."""
    floor = FLOOR * max((_size(part) for call in one.values() for _, part in call.made), default=0.0)
    names = [name for name in one if name in found and one[name].made]
    return {
        name: error
        for name in names
        if (error := _largest(found[name].made, one[name].made, floor)) is not None
    }


def origins(found: Calls, one: Calls, *, allowed: float) -> list[str]:
    """Modules that differ though what they read agrees, in the order of their calls."""
    differing = {name for name, error in output_errors(found, one).items() if not error <= allowed}
    floor = FLOOR * max((_size(part) for call in one.values() for _, part in call.made), default=0.0)
    first = [
        name
        for name in one
        if name in differing
        and one[name].read
        and (_largest(found[name].read, one[name].read, floor) or 0.0) <= allowed
    ]
    # a container differs because something in it does
    return [name for name in first if not any(other.startswith(f"{name}.") for other in first)]


def _largest(found: list[tuple[int, Tensor]], one: list[tuple[int, Tensor]], floor: float) -> float | None:
    if len(found) != len(one):
        return None
    largest = 0.0
    for (start, mine), (_, whole) in zip(found, one, strict=True):
        rows = whole[start : start + len(mine)]
        if rows.shape != mine.shape:
            return None
        difference = float((mine - rows)[:, 0].norm())
        if difference != difference:
            return difference
        if difference:
            largest = max(largest, difference / max(_size(rows), floor))
    return largest


def _size(part: Tensor) -> float:
    return float(part[:, 1].norm())
