"""Claim: in inference results are written over memory that nothing reads later, and over no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from lightning_amp.graph.capture import Captures
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.find_regions import find_regions
from lightning_amp.techniques.chunk.regions.region import written_over
from lightning_amp.techniques.chunk.run.lower import lower, table_of
from lightning_amp.techniques.chunk.run.planned import measured_bytes
from tests.techniques.chunk.case import which
from tests.techniques.chunk.small_blocks import BLOCKS
from tests.techniques.chunk.test_chunk_module import bytes_of, close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Does(nn.Module):
    """A function of x and of a linear layer."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run, self.linear = run, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def later(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    return F.silu(y).cumsum(1) + y


def view_later(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    v = y.transpose(1, 2)
    return F.silu(y) @ v


def view_within(m: Any, x: Tensor) -> Tensor:
    """The same memory once cut and once whole: pieces of the sum may not be written over it."""
    y = m.linear(x)
    weight = y @ y.transpose(1, 2)
    return torch.sigmoid(y) + weight


def own_transpose(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    return y + y.transpose(1, 2)


def no_copy(m: Any, x: Tensor) -> Tensor:
    """Of one row nothing is copied: then `y` is the argument's memory, where chunks are that small."""
    y = x.transpose(0, 1).contiguous()
    return F.silu(y).exp()


def reshaped(m: Any, x: Tensor) -> Any:
    y = x.flatten(1)
    return F.silu(y) * 2


def expanded(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)[:, :1].expand(-1, 6, -1)
    return F.silu(y).exp()


def returned(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    return F.silu(y).exp(), y, x, F.dropout(x, 0.5, False)


def residual(m: Any, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.5, False)
    return m.linear(F.silu(m.linear(x) + x)) + x


def two_results(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    return F.silu(y), y.exp()


def broadcast_with(m: Any, x: Tensor) -> Tensor:
    y, one = m.linear(x), m.linear(x[:, :1])
    return one.exp() + y


def one_place_for_two(m: Any, x: Tensor) -> Any:
    y = m.linear(x).exp()
    return y.sin(), y.cos()


def before_the_pieces(m: Any, x: Tensor) -> Tensor:
    """`b` is needed whole, so it is computed before the pieces that read `y`."""
    y = m.linear(x)
    a, b = y.exp(), F.silu(y)
    return a @ b.transpose(1, 2)


def changed(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    z = F.silu(y)
    y.add_(z)
    return z.exp() * y


RUNS = (later, view_later, view_within, own_transpose, no_copy, reshaped, expanded, returned)
RUNS += (residual, two_results, broadcast_with, changed, one_place_for_two, before_the_pieces)
TRAPS = {run.__name__: (lambda run=run: Does(run), lambda: (torch.randn(3, 6, 6),)) for run in RUNS}


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(("name", "regions_of"), which(TRAPS | BLOCKS, "attention"))
@torch.no_grad()
def test_every_region_writes_over_nothing_that_is_read(name: str, regions_of: Any) -> None:
    """Results in float64 to 1e-10, arguments and parameters bit for bit; and bytes are never above the prediction."""
    torch.manual_seed(0)
    make, args = (TRAPS | BLOCKS)[name]
    block = make().double().eval()
    given = [a.detach().double() if a.is_floating_point() else a for a in args()]
    kept = [t.clone() for t in (*given, *block.parameters())]
    right = block(*given)
    capture = Captures().of(block, given, {})
    table = table_of(capture)
    for i, regions in enumerate([(), *((some,) for some in regions_of(find_regions(table)))]):
        run = lower(capture, table, regions)
        close(run(block, *given), right)
        for now, before in zip((*given, *block.parameters()), kept, strict=True):
            assert torch.equal(now, before), regions
        # counting takes ten times as long as running, and most regions of a block are alike
        if name in TRAPS or i % 8 == 0:
            assert measured_bytes(run) <= chunk_bytes(table, regions).peak_bytes


@torch.no_grad()
def test_what_is_written_over_what() -> None:
    """By an operator in its place, and by a region in the place of an input that it reads cut."""
    block, x = Does(residual).eval(), torch.randn(3, 6, 6)
    capture = Captures().of(block, (x,), {})
    table = table_of(capture)
    names = [row.name for row in table.rows]
    over = {row.name: names[row.over] for row in table.rows if row.over >= 0}
    assert over == {"add": "linear", "silu": "add", "add_1": "linear_1"}
    assert "torch._C._nn.silu(add, out=add)" in lower(capture, table, ()).code
    silu = next(r for r in find_regions(table) if r.first == r.last == names.index("silu"))
    assert written_over(table, silu) == {names.index("silu"): names.index("add")}
    # what is written over another makes no memory
    block, x = Does(lambda m, x: F.silu(m.linear(x)).exp()).eval(), torch.randn(3, 6, 6)
    capture = Captures().of(block, (x,), {})
    table = table_of(capture)
    assert chunk_bytes(table, ()).peak_bytes == measured_bytes(lower(capture, table, ())) == 4 * x.numel()


def test_with_gradients_nothing_is_written_over() -> None:
    block, x = Does(residual).eval(), torch.randn(3, 6, 6)
    assert all(row.over < 0 and not row.free for row in table_of(Captures().of(block, (x,), {})).rows)


def test_fewer_bytes_without_chunks() -> None:
    """At a budget that operators in place meet, nothing is cut."""
    block, x = Does(lambda m, x: F.silu(m.linear(x)).exp()).double().eval(), torch.randn(3, 6, 6).double()
    whole, right = bytes_of(block, x)
    small = lightning_amp.chunk(block, x, budget=whole // 2)
    assert small.plan.regions == {"": ()}
    assert small.plan.whole_bytes == whole
    found, y = bytes_of(small, x)
    assert found == small.plan.peak_bytes == whole // 2
    close(y, right)
