"""Claim: every legal region computes in chunks what it computes whole, in training and in inference, where results are
written over memory that nothing reads later; images are cut by rows through convolutions, pooling and group norm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from lightning_amp.graph.captures import Captures
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.region import written_over
from lightning_amp.techniques.chunk.run.lower import lower, table_of
from lightning_amp.techniques.chunk.run.planned import lower_within, measured_bytes
from lightning_amp.techniques.chunk.run.smaller_call import lowered_like
from lightning_amp.techniques.chunk.run.two_steps import group_norm, in_two_steps, norms_of
from tests.graph.calls import difference
from tests.techniques.chunk.case import case, which
from tests.techniques.chunk.regions.tables import find_regions
from tests.techniques.chunk.small_blocks import BLOCKS
from tests.techniques.chunk.test_chunk_module import bytes_of, close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.long
@pytest.mark.parametrize(("name", "regions"), which(BLOCKS, "attention"))
def test_every_region_of_small_blocks_is_exact(name: str, regions: Any) -> None:
    """Results, loss and all gradients in float64, to 1e-10."""
    found = case(name)
    assert found.regions
    for some in regions(found.regions):
        assert found.error(some) == "", some


class Does(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run, self.linear = run, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def changed(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    z = F.silu(y)
    y.add_(z)
    return z.exp() * y


def residual(m: Any, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.5, False)
    return m.linear(F.silu(m.linear(x) + x)) + x


RUNS: dict[str, Callable[[Any, Tensor], Any]] = {
    "later": lambda m, x: F.silu(y := m.linear(x)).cumsum(1) + y,
    "view_later": lambda m, x: F.silu(y := m.linear(x)) @ y.transpose(1, 2),
    # the same memory once cut and once whole: pieces of the sum may not be written over it
    "view_within": lambda m, x: (y := m.linear(x)) @ y.transpose(1, 2) + torch.sigmoid(y),
    "own_transpose": lambda m, x: (y := m.linear(x)) + y.transpose(1, 2),
    # of one row nothing is copied: then the argument of silu is that of the block, where chunks are that small
    "no_copy": lambda m, x: F.silu(x.transpose(0, 1).contiguous()).exp(),
    "reshaped": lambda m, x: F.silu(x.flatten(1)) * 2,
    "expanded": lambda m, x: F.silu(m.linear(x)[:, :1].expand(-1, 6, -1)).exp(),
    "returned": lambda m, x: (F.silu(y := m.linear(x)).exp(), y, x, F.dropout(x, 0.5, False)),
    "residual": residual,
    "two_results": lambda m, x: (F.silu(y := m.linear(x)), y.exp()),
    "broadcast_with": lambda m, x: ((y := m.linear(x)), m.linear(x[:, :1]).exp() + y)[1],
    "changed": changed,
    "one_place_for_two": lambda m, x: ((y := m.linear(x).exp()).sin(), y.cos()),
    # what the product reads whole is computed before the pieces that read `y`
    "before_the_pieces": lambda m, x: (y := m.linear(x)).exp() @ F.silu(y).transpose(1, 2),
}
TRAPS = {name: (lambda run=run: Does(run), lambda: (torch.randn(3, 6, 6),)) for name, run in RUNS.items()}


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


conv = nn.Conv2d
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "two": lambda: nn.Sequential(conv(2, 3, 3, padding=1), nn.SiLU(), conv(3, 2, 5, padding=2)),
    "dilated": lambda: nn.Sequential(nn.SiLU(), conv(2, 2, 3, padding=2, dilation=2), nn.Tanh()),
    "pooled": lambda: nn.Sequential(
        conv(2, 2, 3, padding=1), nn.AvgPool2d(2), conv(2, 2, 3, padding=1), nn.Upsample(scale_factor=2), conv(2, 2, 1)
    ),
    "not alike": lambda: nn.Sequential(nn.SiLU(), conv(2, 2, 3), conv(2, 2, 3, stride=2, padding=1)),
    "one by one, moved": lambda: nn.Sequential(nn.SiLU(), conv(2, 2, 1, stride=2, padding=4), nn.SiLU()),
    "overlapping pools": lambda: nn.Sequential(nn.SiLU(), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2, 2, 1), nn.SiLU()),
    "norm": lambda: nn.Sequential(conv(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), conv(4, 2, 3, padding=1)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("name", "regions"), which(IMAGES, "norm"))
def test_every_region_of_rows_is_exact(name: str, regions: Any) -> None:
    """Results without gradients and with them, loss and gradients in float64 to 1e-10; bytes as predicted or fewer."""
    torch.manual_seed(0)
    block, x = IMAGES[name]().double(), torch.randn(2, 2, 8, 6, dtype=torch.float64)
    right, reached = block(x).detach(), 0
    with torch.no_grad():
        found = Captures().of(block, (x,), {})
        capture = in_two_steps(found, range(len(norms_of(found))))
        table = table_of(capture, near=True)
    for i, some in enumerate(regions(find_regions(table))):
        reached = max(reached, some.reach)
        with torch.no_grad():
            run = lower(capture, table, (some,))
            close(run(block, x), right)
            # counting takes ten times as long as running, and most regions are alike
            if some.reach or i % 8 == 0:
                assert measured_bytes(run) <= chunk_bytes(table, (some,)).peak_bytes
        if some.reach and some.n_chunks > 2:
            again = lower(capture, table_of(capture, near=True), (some,))
            assert difference(block, again, (x.clone().requires_grad_(),), {}) == ""
    assert (reached > 0) == (name not in ("not alike", "one by one, moved", "overlapping pools"))


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_in_two_steps(affine: bool) -> None:
    """Also where the mean is a thousand times the deviation."""
    norm, x = nn.GroupNorm(2, 6, affine=affine).double(), torch.randn(3, 6, 5, 7).double() + 1000
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    close(group_norm(x, 2, norm.weight, norm.bias, norm.eps), norm(x))


def test_what_two_steps_are_made_of() -> None:
    """On a CPU it takes 20 times as long as a mean of squares; that of the means of rows is small."""
    with torch.no_grad():
        split = in_two_steps(Captures().of(nn.GroupNorm(2, 4), (torch.randn(1, 4, 8, 8),), {}), {0})
    assert split.graph is not None
    taken = [n for n in split.graph.graph.nodes if n.target is torch.ops.aten.var.correction]
    assert [n.args[0].meta["val"].dim() for n in taken] == [3]
    # two steps for images in 32 bits and more
    for norm, x in ((nn.GroupNorm(2, 4).bfloat16(), torch.randn(1, 4, 3, 3).bfloat16()),
                    (nn.GroupNorm(2, 4), torch.randn(1, 4, 3)), (nn.SiLU(), torch.randn(1, 4, 3, 3))):  # fmt: skip
        with torch.no_grad():
            assert not norms_of(Captures().of(norm, (x,), {}))

    # what costs nothing is made for every reader
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.cat([F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2)], 1)
            return F.group_norm(y, 2) + y

    with torch.no_grad():
        capture = in_two_steps(Captures().of(Twice(), (torch.randn(1, 2, 4, 4),), {}), {0})
    names = [str(node.target) for node in capture.graph.graph.nodes]
    assert names.count("aten.cat.default") == 2
    assert names.count("aten.upsample_nearest2d.vec") == 4


class Levels(nn.Module):
    """Norms of a large image, and of a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for k, (norm, one) in enumerate(zip(self.norms, self.convs, strict=True)):
            x = one(F.silu(norm(x)))
            x = F.avg_pool2d(x, 4) if k == 0 else x
        return x


def test_only_norms_above_the_budget_are_in_two_steps() -> None:
    """Of the small image they are computed as they are, in one kernel; results stay the same."""
    block, x = Levels().double(), torch.randn(1, 8, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        capture, right = Captures().of(block, (x,), {}), block(x)
        budget = x.nbytes * 9 // 10
        lowered, plan = lower_within(capture, budget)
        assert lowered.norms == {0}
        assert lowered.code.count("torch.group_norm") == 3
        assert measured_bytes(lowered) == plan.peak_bytes <= budget
        close(lowered(block, x), right)
        small = Captures().of(block, (x[..., :16, :16],), {})
        assert lowered_like(lowered, small) is not None, "which the check against the block runs"
