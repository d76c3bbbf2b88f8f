"""Claim: the technique `chunk` trains a block of any module to the same numbers within its bytes."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError, ModelError, PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Captures
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run.chunk_module import chunk_block
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from lightning_amp.techniques.chunk.run.planned import lower_within
from tests.any_module import make
from tests.graph.calls import calls_of, forward_of
from tests.graph.same_outcome import difference
from tests.graph.test_capture import Custom
from tests.techniques.chunk.small_blocks import Attention, FeedForward, NoBias, x_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def rule(budget_bytes: int, fqn: str = "*.0") -> Rule:
    return Rule(fqn=fqn, strategy="chunk", spec=ChunkBlock(budget_bytes=budget_bytes), why="a test")


def step_bytes(run: Any, x: torch.Tensor) -> int:
    """Most bytes of forward and backward pass beyond the gradient of the result."""
    with torch.no_grad():
        seed = torch.ones_like(run(x))
    with LiveBytes() as live:
        y = run(x)
        y.backward(seed)
    return live.peak


@pytest.mark.parametrize("make_block", [Attention, FeedForward])
def test_a_block_trains_within_its_bytes(make_block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    block = make_block(16).double()  # type: ignore[call-arg]
    x = x_of(2, 64, 16).detach().double().requires_grad_()
    whole = step_bytes(copy.deepcopy(block), x.detach().requires_grad_())
    run = InChunks(whole // 2, train=True)
    assert difference(block, run, (x,)) == ""
    found = step_bytes(lambda x: run(block, x), x)
    plan = run.planned(block, (x,), {}).chunks
    assert plan.regions[""]
    assert found == plan.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("make_block", [Attention, NoBias])
def test_random_budgets_in_training_are_held(make_block: type[nn.Module]) -> None:
    """What a plan says is what the meter counts, and more memory is never slower."""
    torch.manual_seed(0)
    block, x = make_block(8), x_of(2, 24, 8)  # type: ignore[call-arg]
    capture, draw = Captures().of(block, (x,), {}), random.Random(0)
    whole, before = step_bytes(block, x), float("inf")
    found = []
    for budget in sorted(int(whole * draw.uniform(0.3, 1.05)) for _ in range(8)):
        try:
            lowered, plan = lower_within(capture, budget, train=True)
        except PlanError:
            continue
        block.zero_grad(set_to_none=True)
        x.grad = None
        found.append(step_bytes(lambda x, run=lowered: run(block, x), x))
        assert found[-1] == plan.peak_bytes <= budget
        assert plan.seconds <= before
        before = plan.seconds
    assert len(set(found)) > 3


def test_blocks_that_are_alike_are_planned_once() -> None:
    """Under one budget, where they know each other's plans; another budget has another plan."""
    torch.manual_seed(0)
    x, blocks = torch.randn(2, 32, 8), [Attention(8) for _ in range(3)]
    whole = step_bytes(blocks[0], x.requires_grad_())
    forms = [InChunks(n, train=True) for n in (whole // 2, whole // 2, whole)]
    for form in forms:
        form.known = forms[0].known
    plans = [form.planned(block, (x,), {}) for form, block in zip(forms, blocks, strict=True)]
    assert plans[0] is plans[1]
    assert plans[0].chunks.regions != plans[2].chunks.regions
    torch.testing.assert_close(forms[1](blocks[1], x), blocks[1](x))


def test_a_rule_sets_the_forward_and_takes_it_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Attention(16), nn.Identity()))
    x = torch.randn(2, 64, 16)
    right = model(x)
    installed = install_rules(model, [rule(200_000, "0.0")])
    assert "forward" in vars(model[0][0])
    torch.testing.assert_close(model(x), right)
    torch.testing.assert_close(copy.deepcopy(model)(x), right)
    installed.undo()
    assert "forward" not in vars(model[0][0])


@pytest.mark.long
def test_a_step_of_an_example_module_with_chunks_in_every_block() -> None:
    """Loss and all gradients in float64, to 1e-10."""
    module, batch = make("evoformer")
    module, batch = module.double().eval(), (batch[0].double(), batch[1])
    twin = copy.deepcopy(module)
    (call,) = calls_of("evoformer")
    whole = step_bytes(call.block.eval(), call.args[0].detach().requires_grad_())
    install_rules(module, [rule(whole, "blocks.[01]")])
    for each in (module, twin):
        forward_of(each, batch)().backward()
    assert "forward" in vars(module.blocks[1])
    for own, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-14)


def test_what_does_not_fit_or_cannot_be_captured_is_refused_or_told() -> None:
    with pytest.raises(InstallError, match="got budget_bytes=0; allowed is a number of bytes larger than zero"):
        chunk_block(FeedForward(), ChunkBlock(budget_bytes=0), None)
    with pytest.raises(PlanError, match="at least"):
        InChunks(100)(FeedForward(), x_of(8, 6))
    with pytest.raises(ModelError, match="in training, which cannot be captured: .*'Twice'"):
        InChunks(10**6, train=True)(Custom(), x_of(3, 4))
    # a call that needs more than its plan was made for is told
    block, x = FeedForward(), x_of(8, 6)
    with pytest.warns(UserWarning, match=r"has 100 B by the plan.*called with \[8, 6\] it needs"):
        found = InChunks(100, train=True)(block, x)
    torch.testing.assert_close(found, block(x))
