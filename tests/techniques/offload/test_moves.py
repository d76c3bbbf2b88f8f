"""Steps whose saved tensors wait on the host are bit by bit those of autograd, and the device's bytes are the counted
ones; what autograd would refuse is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.techniques.host_memory.host_pool import Buffer
from lightning_amp.techniques.offload.copies import Copies
from lightning_amp.techniques.offload.moves import Moves
from lightning_amp.techniques.offload.unseen_writes import UnseenWrites
from tests.techniques.replay.cases import CASES, DOUBLE, equal, rows, trained, weight

LARGE = 2**40


def moves(*, leaves: tuple[int, ...] | None = None, window: int = 0, limit: int | None = None) -> Moves:
    return Moves(least_bytes=1, leaves=leaves, window=window, limit=limit)


def moved(make: Callable[[], Any], **options: Any) -> tuple[list[Any], Moves]:
    """What `trained` returns of steps whose tensors wait on the host, and the moves."""
    used = moves(**options)

    @contextmanager
    def inside(parameters: Any, first: bool) -> Iterator[None]:
        with used.step(parameters), UnseenWrites(used):
            yield

    return trained(make, inside), used


def draws() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        own = torch.Generator().manual_seed(4)
        h = functional.dropout(rows(6, 8) @ w, 0.3, True, inplace=True)
        h = functional.alpha_dropout(h, 0.2, True)
        h = h * torch.rand(6, 8, generator=own, dtype=DOUBLE) + torch.randn_like(h) * h
        return (h @ w).square().sum() + (torch.bernoulli(torch.full((6, 8), 0.5, dtype=DOUBLE)) * h).sum()

    return step, [w]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_every_step_is_the_same_whatever_leaves() -> None:
    wrong, n_left = list[str](), 0
    # refused below
    for name, make in {**CASES, "random_numbers": draws}.items():
        right = trained(make)
        for options in ({"window": 0}, {"window": 600}, {"window": LARGE}, {"leaves": (0, 1)}, {"leaves": (1, 2, 5)}):
            found, used = moved(make, **options)
            n_left += len(used.sizes)
            if not equal(right, found):
                wrong.append(f"{name} {options}")
            if used.pool.n_bytes > sum(used.sizes):
                wrong.append(f"{name} {options}: {used.pool.n_bytes} bytes on the host for {sum(used.sizes)}")
    assert not wrong
    assert n_left > 300


def layers() -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    """A step that saves views, slices, one storage several times, and results that were written in place."""
    w, v = (nn.Parameter(torch.empty(shape, dtype=DOUBLE).fill_(0.1)) for shape in ((64, 192), (64, 64)))

    def step(x: Tensor) -> Tensor:
        h = x @ v
        for _ in range(3):
            q, k, g = (h @ w).view(-1, 8, 192).transpose(0, 1).chunk(3, -1)
            h = (q * k + g.sin() * q).transpose(0, 1).reshape(-1, 64)
            h = functional.dropout(functional.relu(h, inplace=True), 0.2) @ v
            h = h[::2].repeat_interleave(2, 0).cumsum(0).tanh()
        return h.square().mean()

    return step, [w, v]


@pytest.mark.parametrize("window", [0, 100_000, LARGE])
def test_bytes_are_counted_without_values(window: int) -> None:
    found = list[Any]()
    for fake in (False, True):
        with QuickFakes(valid=True) if fake else nullcontext():
            step, parameters = layers()
            x, used, peaks = torch.ones(64, 64, dtype=DOUBLE), moves(window=window), list[int]()
            for _ in range(2):
                with LiveBytes() as live:
                    live.watch([x, *parameters])
                    with used.step([x, *parameters]), UnseenWrites(used):
                        loss = step(x)
                    loss.backward()
                del loss
                peaks.append(live.peak)
            found.append((peaks, used.pool.n_bytes, used.sizes, used.came_bytes))
    assert found[0] == found[1]
    # the last ones never leave
    assert sum(found[0][2]) - window <= found[0][3] <= sum(found[0][2])
    whole = {w: _peak(w) for w in (None, window)}
    assert whole[window] <= whole[None] + (0 if window == LARGE else window)
    assert window or whole[0] < 0.6 * whole[None]


def _peak(window: int | None) -> int:
    step, parameters = layers()
    x, used = torch.ones(64, 64, dtype=DOUBLE), moves(window=window or 0)
    with LiveBytes() as live:
        with nullcontext() if window is None else used.step([x, *parameters]):
            loss = step(x)
        loss.backward()
    return live.peak


def written_after_it_was_saved(w: Tensor) -> Tensor:
    h = (rows(4, 8) @ w).exp()
    y = h.sin()
    h.mul_(2)
    return (y @ w).sum()


def view_written(w: Tensor) -> Tensor:
    h = (rows(4, 8) @ w).exp()
    y = h.sin()
    h.view(-1)[3:5] = 1.0
    return (y @ w).sum()


def batch_written(w: Tensor) -> Tensor:
    x = rows(4, 8)
    y = (x @ w).sin()
    x.mul_(2)
    return y.sum()


@pytest.mark.parametrize("step", [written_after_it_was_saved, view_written, batch_written])
def test_a_tensor_written_after_it_was_saved_is_refused_as_by_autograd(step: Callable[[Tensor], Tensor]) -> None:
    w = weight(8, 8)
    with pytest.raises(RuntimeError, match="inplace"):
        step(w).backward()
    for window in (0, LARGE):
        used = moves(window=window)
        with used.step([w]):
            loss = step(w)
        with pytest.raises(ModelError, match="changed in place"):
            loss.backward()
        assert used.sizes


def test_a_write_after_the_step_is_refused() -> None:
    w, used = weight(8, 8), moves()
    with used.step([w]):
        loss = (rows(4, 8) @ w).sin().sum()
    with torch.no_grad():
        w.add_(1)
        loss2 = loss
    assert loss2.item() == loss.item()
    # the parameter stays, and its counter is compared too
    with used.step([w]):
        loss = ((rows(4, 8) @ w).sin() @ w).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(ModelError, match="changed in place"):
        loss.backward()


def test_writes_that_no_counter_shows_are_refused() -> None:
    w = weight(8, 8)

    def by_data() -> Tensor:
        h = (rows(4, 8) @ w).exp()
        y = h.sin()
        h.data.mul_(2)
        return (y * h).sum()

    steps: dict[str, Callable[[], Tensor]] = {"mul_": by_data, "rrelu_with_noise": CASES["random_numbers"]()[0]}
    for name, step in steps.items():
        used = moves()
        with pytest.raises(ModelError, match=rf"{name}.* autograd does not see"), used.step([w]), UnseenWrites(used):
            step()
    # what did not leave may be written
    used = moves(leaves=())
    with used.step([w]), UnseenWrites(used):
        by_data().backward()


def test_a_storage_moves_once_and_again_where_it_was_written() -> None:
    x = rows(64, 64).requires_grad_()
    used = moves()
    with used.step([x]):
        h = x * 2
        a, b, c = h.exp().sum(), h.t().sin().sum(), h[3].cos().sum()
        loss = a + b + c
        del h, a, b, c
    # exp keeps its result, the others share one storage
    assert used.sizes == [64 * 64 * 8] * 2
    loss.backward()
    assert used.came_bytes == sum(used.sizes)
    used = moves()
    with used.step([x]):
        h = x * 2
        first = h.detach().clone().requires_grad_()
        h.sin()
        with torch.no_grad():
            h.add_(1)
        loss = h.cos().sum() + first.sin().sum()
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, -2 * (x * 2 + 1).sin(), rtol=0, atol=0)
    assert len(used.sizes) == 3


def test_a_graph_that_is_kept_comes_back_again_and_its_memory_is_used_again() -> None:
    x, used = rows(64, 64).requires_grad_(), moves()
    for _ in range(2):
        with used.step([x]):
            loss = (x * 2).sin().square().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)[0]
        assert used.came_bytes == sum(used.sizes)
        again = torch.autograd.grad(loss, x, retain_graph=True)[0]
        right = torch.autograd.grad((x * 2).sin().square().sum(), x, create_graph=True)[0]
        assert torch.equal(first, again)
        assert torch.equal(first, right)
        second = [torch.autograd.grad(one.sum(), x)[0] for one in (first, right)]
        assert torch.equal(*second)
        del loss, first, again
    assert used.pool.n_bytes == 2 * 64 * 64 * 8


def test_what_the_device_still_holds_is_used_from_there() -> None:
    x, used = rows(64, 64).requires_grad_(), moves()
    with used.step([x]):
        h = x * 2
        loss = h.sin().sum()
    loss.backward()
    assert used.sizes
    assert used.came_bytes == 0


def test_more_host_memory_than_allowed_is_refused() -> None:
    x, used = rows(64, 64).requires_grad_(), moves(limit=40_000)
    with (
        pytest.raises(ModelError, match=r"need 64.0 KiB of host memory or more, and may have 39.1 KiB; raise host_mem"),
        used.step([x]),
    ):
        (x * 2).sin().exp().sum()


def test_what_comes_back_is_compared_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    x, used, back = rows(64, 63).requires_grad_(), moves(), Copies.back

    def damaged(copies: Copies, buffer: Buffer, whole: Tensor) -> Any:
        done = back(copies, buffer, whole)
        whole[-1] ^= 1
        return done

    def step() -> None:
        with used.step([x]):
            loss = (x * 2).sin().square().sum()
        loss.backward()  # type: ignore[no-untyped-call]

    step()
    step()
    used = moves()
    monkeypatch.setattr(Copies, "back", damaged)
    step()
    with pytest.raises(ModelError, match="with other values than it had left with"):
        step()


def test_placeholders_of_a_run_with_values_stay() -> None:
    used = moves()
    with QuickFakes():
        fake = torch.ones(4, 4, requires_grad=True)
        with used.step([torch.ones(1)]):
            fake.exp()
        # of a counted step they would leave
        assert used.sizes == [64]
    with used.step([torch.ones(1)]), QuickFakes():
        fake.exp()
    assert used.sizes == []
