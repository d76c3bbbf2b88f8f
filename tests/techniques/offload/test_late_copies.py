"""Copies that run as late as a GPU's streams may run them change no value: nothing is read, freed or used again before
the copy that it waits for."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp.techniques.offload import moves as moves_module
from lightning_amp.techniques.offload.copies import Copies
from lightning_amp.techniques.offload.moves import Moves
from tests.techniques.offload.test_moves import LARGE, draws, layers
from tests.techniques.replay.cases import CASES, equal, trained


class LateCopy:
    """A copy that runs when something waits for it; the event of its end is the object itself.

    Args:
        before: Copies that end before it begins.
    """

    def __init__(self, source: Tensor, target: Tensor, before: Iterable["LateCopy | None"]) -> None:
        # memory that Python has freed is another tensor's on a device, and is written when its copy runs
        self._source, self._target = (weakref.ref(tensor.untyped_storage()) for tensor in (source, target))
        self._before, self._ended, self._n_bytes = before, False, source.numel()

    def run(self) -> None:
        """Run it, and before it what it waits for."""
        if self._ended:
            return
        for copy in self._before:
            if copy is not None:
                copy.run()
        self._ended = True
        source, target = self._source(), self._target()
        assert source is not None, "freed before it was copied"
        assert target is not None, "freed before its values came"
        _bytes(target)[: self._n_bytes].copy_(_bytes(source)[: self._n_bytes])


class LateCopies(Copies):
    """Streams on which a copy runs only when something waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.newest = dict[str, LateCopy]()

    def start(
        self, pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device, direction: str, after: Any = None
    ) -> Any:
        for source, target in pairs:
            # NaN in any floating-point type, until the values are there
            target.fill_(255)
            self.newest[direction] = LateCopy(source, target, (self.newest.get(direction), after))
        return self.newest[direction]

    def wait(self, done: Any, device: torch.device) -> None:
        done.run()

    def finish(self, device: torch.device) -> None:
        for copy in self.newest.values():
            copy.run()


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves_module, "Copies", LateCopies)


def late_steps(make: Callable[[], Any], window: int) -> tuple[list[Any], int]:
    """Return what the steps compute, and the bytes that came back in the last one."""
    used = Moves(least_bytes=1, leaves=None, window=window, limit=None)

    @contextmanager
    def inside(parameters: Any, first: bool) -> Iterator[None]:
        with used.step(parameters):
            yield

    found = trained(make, inside)
    used._copies.finish(torch.device("cpu"))
    return found, used.came_bytes


@pytest.mark.parametrize("window", [0, 40_000, 100_000, 400_000, LARGE])
def test_values_are_those_of_a_plain_step(window: int) -> None:
    def make() -> Any:
        step, parameters = layers()
        x = torch.ones(64, 64, dtype=torch.float64)
        return (lambda: step(x)), parameters

    found, came_bytes = late_steps(make, window)
    assert came_bytes or window == LARGE
    assert equal(trained(make), found)


def test_a_graph_may_be_freed_while_its_storages_are_on_their_way() -> None:
    step, parameters = layers()
    x, used = torch.ones(64, 64, dtype=torch.float64), Moves(least_bytes=1, leaves=None, window=100_000, limit=None)
    with used.step([x, *parameters]):
        h = step(x)
        y = h.exp()
    # those before y's, of which nothing will be read, are fetched ahead
    torch.autograd.grad(y, [h])
    came_bytes = used.came_bytes
    del h, y
    used._copies.finish(x.device)
    assert came_bytes > 60_000


@pytest.mark.long
@pytest.mark.parametrize("window", [0, 600, LARGE])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_every_step_is_the_same(window: int) -> None:
    # the draws of the other one are refused beside offload
    cases = {**CASES, "random_numbers": draws}
    assert not [name for name, make in cases.items() if not equal(trained(make), late_steps(make, window)[0])]
