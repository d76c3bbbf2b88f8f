"""Claim: a region that runs chunk by chunk computes what the block computes, forward and backward, or is refused."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.errors import ModelError
from lightning_amp.graph.captures import Captures
from lightning_amp.techniques.chunk.regions.region import Region
from lightning_amp.techniques.chunk.run.function import ChunkedRegion, Output
from lightning_amp.techniques.chunk.run.lower import lower, table_of
from tests.techniques.chunk.case import Case, case
from tests.techniques.chunk.regions.tables import find_regions
from tests.techniques.chunk.small_blocks import FeedForward, NoBias, x_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_two_regions_and_two_backward_passes_of_one_block() -> None:
    found = case("attention")
    softmax = min((r for r in found.regions if _has(found, r, "softmax.int")), key=lambda r: r.last - r.first)
    later = [r for r in found.regions if r.first > softmax.last]
    both = [replace(softmax, n_chunks=2), replace(max(later, key=lambda r: r.last - r.first), n_chunks=2)]
    assert found.error(*both) == ""
    # a second backward pass gives the same
    form, x = lower(found.capture, found.table, [found.where("softmax.int", 2)]), found.args[0]
    loss = form(found.block, x).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def _has(found: Case, region: Region, op: str) -> bool:
    return any(found.table.rows[i].op == f"aten.{op}" for i in region.inside(found.table))


def test_gradients_of_a_region_are_those_of_eager_or_refused() -> None:
    found = case("feed-forward")
    form = lower(found.capture, found.table, [found.where("gelu.default", 1)])
    with torch.no_grad():
        assert form(found.block, *found.args).grad_fn is None
    with torch.inference_mode():
        torch.testing.assert_close(form(found.block, *found.args), found.block(*found.args), rtol=1e-14, atol=0)
    assert "Chunked" in str(form(found.block, *found.args).grad_fn)
    # a second derivative is refused
    x = found.args[0]
    with pytest.raises(ModelError, match="a second derivative is not supported .create_graph=True. through a region"):
        torch.autograd.grad(form(found.block, x).sum(), x, create_graph=True)
    # a changed input is noticed in the backward pass
    y = form(found.block, *found.args)
    with torch.no_grad():
        found.block.wide.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_frozen_parameters_and_inputs_without_gradients() -> None:
    torch.manual_seed(0)
    block = FeedForward()
    block.wide.requires_grad_(False)
    block.norm.weight.requires_grad_(False)
    found = Case(block, (x_of(2, 7, 6).detach(),))
    for region in (r for r in found.regions if _has(found, r, "gelu.default")):
        assert found.error(replace(region, n_chunks=2)) == ""


def test_an_input_that_no_chunk_reaches_has_no_gradient() -> None:
    """None, not zeros, as in eager: an optimiser with momentum or weight decay tells them apart."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.a(x).tanh(), (self.b(x) > 0).to(torch.int64)

    block = Half()
    found = Case(block, (x_of(6, 4),))
    (whole,) = (r for r in found.regions if len(r.inside(found.table)) == 5 and r.dims[r.last] == 0)
    form = lower(found.capture, found.table, [whole])
    (first, second), x = form(found.block, *found.args), found.args[0]
    assert not second.requires_grad
    first.sum().backward()
    assert found.block.b.weight.grad is None
    assert found.block.a.weight.grad is not None
    assert x.grad is not None


class Tied(nn.Module):
    """One layer inside a region and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cumsum(self.layer(x).tanh(), 0))


@pytest.mark.parametrize("make", [FeedForward, Tied, NoBias])
def test_under_autocast(make: type[nn.Module]) -> None:
    """Numbers of bfloat16: results equal eager's where nothing is summed, gradients to its rounding.

    A parameter that is used inside of a region and outside of it has the gradients of both.
    """
    torch.manual_seed(0)
    block, x = make(), x_of(8, 6)
    right, twin = copy.deepcopy(block), x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        capture = Captures().of(block, (x,), {})
        table = table_of(capture)
        cut = [
            r
            for r in find_regions(table)
            if r.dims.get(r.last) == 0 and not any("cumsum" in table.rows[i].op for i in r.inside(table))
        ]
        region = max(cut, key=lambda r: len(r.inside(table)))
        y = lower(capture, table, [replace(region, n_chunks=3)])(block, x)
        expected = right(twin)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    weights = x_of(8, 6, seed=1).detach()
    (y.float() * weights).sum().backward()
    (expected.float() * weights).sum().backward()
    for found, eager in zip([x, *block.parameters()], [twin, *right.parameters()], strict=True):
        assert found.grad is not None
        assert eager.grad is not None
        assert (found.grad - eager.grad).abs().max() <= 0.02 * eager.grad.abs().max()


def test_sums_of_16_bits_are_rounded_once() -> None:
    """4096 chunks of 1 + 2 ** -7: added up in bfloat16 they would stay at 256."""

    class Total(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return (x * w).sum(0)

    block, x, w = Total(), torch.ones(4096, 3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
    w.requires_grad_()
    capture = Captures().of(block, (x, w), {})
    table = table_of(capture)
    (region,) = (r for r in find_regions(table) if r.sums and len(r.inside(table)) == 2)
    total = lower(capture, table, [replace(region, n_chunks=4096)])(block, x, w)
    assert total.tolist() == [4096] * 3
    total.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.bfloat16
    assert w.grad.tolist() == [4096] * 3


class Drops(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.dropout(F.gelu(self.wide(self.norm(x))), 0.5, self.training))


def test_active_dropout_is_in_no_region() -> None:
    found = Case(Drops(), (x_of(2, 7, 6),))
    random = [i for i, row in enumerate(found.table.rows) if "dropout" in row.op]
    assert random
    assert not any(set(random).intersection(r.inside(found.table)) for r in found.regions)
    asleep = Case(Drops().eval(), (x_of(2, 7, 6),))
    region = next(r for r in asleep.regions if random[0] in r.inside(asleep.table))
    assert asleep.error(replace(region, n_chunks=2)) == ""


class Counting(FeedForward):
    """Changes a buffer between two operators that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x) + self.count
        self.count += 1
        return self.narrow(y.tanh()) + self.count


class Normed(nn.Module):
    """Running statistics change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.tanh()).exp()


class InPlace(FeedForward):
    """Writes to memory that is read through another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        x.view(-1).mul_(2)
        return self.narrow(F.relu(self.wide(x), inplace=True) + 1).exp()


class PartlyFrozen(FeedForward):
    """A change of the gradient mode is a row of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.wide(x).tanh()
        return self.narrow(y) * self.norm(x).exp()


class Strided(FeedForward):
    """Reads memory by its place."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x).tanh()
        return torch.as_strided(y, (7, 24), (24, 1)) * 2


@pytest.mark.parametrize("make", [Counting, Normed, InPlace, PartlyFrozen, Strided])
def test_blocks_that_change_something_are_cut_around_it(make: type[nn.Module]) -> None:
    x = x_of(8, 6)
    found = Case(make(), (x,))
    assert any(row.writes for row in found.table.rows)
    for region in found.regions:
        assert not any(found.table.rows[i].writes for i in range(region.first, region.last + 1))
        assert found.error(replace(region, n_chunks=2)) == "", region


def test_a_chunk_of_another_shape_is_an_error() -> None:
    """It would be broadcast into the memory of the result: a rule that is wrong does not compute wrong values."""
    made = ChunkedRegion(
        compute=lambda put, size, x: put(0, x[:1]),
        length=4,
        bounds=((0, 2), (2, 2)),
        input_dims=(0,),
        outputs=(Output(name="y", shape=(4,), stride=(1,), dtype=torch.float32, dim=0, needs_grad=True),),
    )
    with pytest.raises(ModelError, match=r"a chunk of 'y' should have the shape \(2,\) .* found \(1,\)"):
        made(torch.ones(4))
