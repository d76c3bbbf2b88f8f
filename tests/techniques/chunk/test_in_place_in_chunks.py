"""Claim: a block whose operators write in place runs in chunks, to the same numbers, in as few bytes as one without."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from tests.graph.calls import Captures, difference
from tests.techniques.chunk.test_in_chunks import step_bytes


class Mlp(nn.Module):
    """Two layers with an activation between them, and before them if that is asked."""

    def __init__(self, act: nn.Module, *, first: bool = False) -> None:
        super().__init__()
        self.act, self.first = act, first
        self.into, self.out = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x) if self.first else x
        return self.out(self.act(self.into(x)))


def least(block: nn.Module, x: Tensor) -> tuple[int, int, str]:
    """Bytes of a step as it is and in chunks, and what is otherwise in chunks."""
    block = block.double()
    leaf = x.detach().requires_grad_()
    whole = step_bytes(lambda x: copy.deepcopy(block)(x + 0), leaf)
    run = InChunks(int(0.5 * whole), train=True)
    wrong = difference(block, run, (leaf,))
    (plan,) = run.known.values()
    assert plan.chunks.regions[""]
    return whole, plan.chunks.peak_bytes, wrong


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [nn.SiLU, nn.ReLU, nn.LeakyReLU, nn.ELU])
def test_an_activation_in_place_does_not_end_a_region(kind: Any, first: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16, dtype=torch.float64)
    found = [least(Mlp(kind(inplace=inplace), first=first), x) for inplace in (False, True)]
    assert [wrong for *_, wrong in found] == ["", ""]
    # the first one writes to the argument, of which autograd keeps a copy
    assert found[1][1] <= found[0][1] + first * x.nbytes
    assert found[1][1] <= 0.5 * found[1][0]


class Viewed(Mlp):
    """Writes to the memory of a view, and reads its base; then to a base, and reads its view."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        y.view(-1, 8).mul_(2)
        first = y[:, :32]
        y.add_(1)
        z = first * 3
        both = y.sin()
        left, right = both[:, :32], both[:, 32:]
        left.add_(right)
        return self.out(torch.cat((z, left + right), -1)) + x.sin().add_(x)


def test_what_is_read_through_another_tensor_is_still_written() -> None:
    block = Viewed(nn.ReLU())
    assert difference(block, Captures().run, (torch.randn(8, 16).requires_grad_(),)) == ""
    graph = Captures().of(block, (torch.randn(8, 16).requires_grad_(),), {}).graph
    assert graph is not None
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("aten.mul_.Tensor") == 1
    assert names.count("aten.add_.Tensor") == 2
