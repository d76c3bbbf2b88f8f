"""Claim: chunks within chunks compute what the module computes, in fewer bytes than simple ones can."""

import pytest
import torch
from torch import Tensor, nn

import lightning_amp
from lightning_amp.errors import PlanError
from tests.techniques.chunk.test_chunk_module import bytes_of, close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Mixed(nn.Module):
    """Within a sample everything meets everything, twice along different dims."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wide(x)
        weight = torch.softmax(x @ x.transpose(1, 2), dim=-1)
        return x.amax(1), (weight @ x.cumsum(1)).tanh()


def test_a_sample_at_a_time_and_rows_within() -> None:
    """Held by the meter, exact, and with gradients too; one byte less is refused."""
    torch.manual_seed(0)
    module, x = Mixed().double().eval(), torch.randn(3, 40, 8).double()
    whole, right = bytes_of(module, x)
    with pytest.raises(PlanError) as caught:
        lightning_amp.chunk(module, x, budget=1)
    least = caught.value.least_bytes
    assert least < whole // 4
    small = lightning_amp.chunk(module, x, budget=least)
    ((region,),) = small.plan.regions.values()
    assert region.n_chunks == 3
    assert "# one chunk of region_0" in small.plan.code[""]
    found, y = bytes_of(small, x)
    assert found == small.plan.peak_bytes == least
    close(y, right)
    with pytest.raises(PlanError, match="requires at least"):
        lightning_amp.chunk(module, x, budget=least - 1)
    x.requires_grad_()
    grads = [torch.autograd.grad(sum(t.sum() for t in run(x)), [x, *module.parameters()]) for run in (small, module)]
    for own, other in zip(*grads, strict=True):
        close(own, other)


def test_mixed_samples_and_rows_that_read_their_neighbours_have_simple_chunks_only() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(0)).double().eval(), torch.randn(3, 40, 8).double()
    with pytest.raises(PlanError) as caught:
        lightning_amp.chunk(module, x, budget=1)
    small = lightning_amp.chunk(module, x, budget=caught.value.least_bytes)
    assert "one chunk of" not in small.plan.code[""]
    close(bytes_of(small, x)[1], module(x))
    # rows of one image that read their neighbours are not nested
    torch.manual_seed(0)
    module, x = (
        nn.Sequential(nn.SiLU(), nn.Conv2d(2, 2, 3, padding=1)).double().eval(),
        torch.randn(1, 2, 24, 24).double(),
    )
    with pytest.raises(PlanError) as caught:
        lightning_amp.chunk(module, x, budget=1)
    small = lightning_amp.chunk(module, x, budget=caught.value.least_bytes)
    found, y = bytes_of(small, x)
    assert found == small.plan.peak_bytes == caught.value.least_bytes
    close(y, module(x))
