"""Claim: images are cut by rows through convolutions, pooling and group norm, and nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.graph.capture import Captures
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.find_regions import find_regions
from lightning_amp.techniques.chunk.run.lower import lower, table_of
from lightning_amp.techniques.chunk.run.planned import lower_within, measured_bytes
from lightning_amp.techniques.chunk.run.smaller_call import lowered_like
from lightning_amp.techniques.chunk.run.two_steps import group_norm, in_two_steps, norms_of
from tests.graph.same_outcome import difference
from tests.techniques.chunk.case import which
from tests.techniques.chunk.test_chunk_module import close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
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
