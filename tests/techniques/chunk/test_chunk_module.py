"""Claim: `lightning_amp.chunk` computes what the module computes within its budget, or says why not."""

import copy
import pickle
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.forward_overrides import overrides_of
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.techniques.chunk.regions.choose_chunks import CostModel, OverBudget
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.run import planned
from lightning_amp.techniques.chunk.run.chunk_module import show_code
from lightning_amp.techniques.chunk.run.planned import lower_within
from tests.odd_modules.collection.blocks import DIM
from tests.odd_modules.collection.forwards import Buffer, ByValue, Nested, Shared
from tests.odd_modules.collection.hooks import Custom
from tests.techniques.chunk.case import Case
from tests.techniques.chunk.small_blocks import Attention, FeedForward, x_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Net(nn.Module):
    def __init__(self, dim: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(dim, 2), FeedForward(dim)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def net() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().double().eval(), torch.randn(2, 48, 16, dtype=torch.float64)


def bytes_of(module: nn.Module, *args: Any) -> tuple[int, Any]:
    """Most bytes alive in a forward pass without gradients, by the meter, and what it returns."""
    with torch.no_grad(), LiveBytes() as live:
        found = module(*args)
    return live.peak, found


def close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.45])
def test_the_budget_holds_by_the_meter(share: float) -> None:
    module, x = net()
    whole, right = bytes_of(module, x)
    small = lightning_amp.chunk(module, x, budget=int(share * whole))
    found, y = bytes_of(small, x)
    assert small.plan.whole_bytes == whole
    assert small.plan.peak_bytes == found <= share * whole
    assert small.plan.regions[""]
    close(y, right)


def test_a_module_of_many_blocks_is_planned_block_by_block() -> None:
    torch.manual_seed(0)
    module, x = Net(8, layers=9).double().eval(), torch.randn(1, 48, 8, dtype=torch.float64)
    whole, right = bytes_of(module, x)
    small = lightning_amp.chunk(module, x, budget=int(0.7 * whole))
    assert list(small.plan.regions) == [f"layers.{k}" for k in range(9)]
    first = small.plan.regions["layers.0"]
    assert first
    assert all(regions == first for regions in small.plan.regions.values())
    assert small.plan.reasons == {"": "it has 9 blocks, which are planned one by one"}
    found, y = bytes_of(small, x)
    assert found == small.plan.peak_bytes <= 0.7 * whole
    close(y, right)


def names_the_least(module: nn.Module, x: Tensor, text: str, *budgets: Any) -> None:
    for budget in budgets:
        with pytest.raises(PlanError, match=text) as caught:
            lightning_amp.chunk(module, x, budget=budget)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    assert bytes_of(lightning_amp.chunk(module, x, budget=least), x)[0] <= least
    with pytest.raises(PlanError):
        lightning_amp.chunk(module, x, budget=least - 1)


def test_a_budget_that_cannot_be_met_names_the_least() -> None:
    names_the_least(*net(), "requires at least .* bytes", 4096)


def test_a_prediction_that_is_too_small_does_not_break_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another search is made with less, until the meter is within the budget."""
    module, x = net()
    whole, right = bytes_of(module, x)
    with pytest.raises(OverBudget) as caught:
        lightning_amp.chunk(module, x, budget=4096)
    real = planned.choose_chunks
    monkeypatch.setattr(planned, "choose_chunks", lambda table, asked, **how: real(table, int(1.2 * asked), **how))
    found, y = bytes_of(lightning_amp.chunk(module, x, budget=whole // 2), x)
    assert found <= whole // 2
    close(y, right)
    with pytest.raises(PlanError, match="requires at least"):
        lightning_amp.chunk(module, x, budget=int(0.95 * caught.value.least_bytes))


@pytest.mark.full
@pytest.mark.parametrize("predicted", [0.8, 1.2])
def test_more_bytes_are_never_slower_and_never_refused(predicted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the search counts too much or too little; what an error names can be met."""
    real = planned.choose_chunks
    wrong = lambda table, asked, **how: real(table, int(predicted * asked), **how)  # noqa: E731
    monkeypatch.setattr(planned, "choose_chunks", wrong)
    found = Case(FeedForward(8), (x_of(24, 8),))
    whole, seconds, least = chunk_bytes(found.table, [], train=True).peak_bytes, [inf], set()
    for k in range(1, 12, 2):
        try:
            lowered, plan = lower_within(found.capture, int(whole * 1.1 ** (k - 10)), train=True)
        except OverBudget as error:
            assert seconds == [inf]
            least.add(error.least_bytes)
            continue
        assert planned.measured_bytes(lowered, train=True) <= whole * 1.1 ** (k - 10)
        seconds.append(plan.seconds)
    assert seconds == sorted(seconds, reverse=True)
    (known,) = least
    assert lower_within(found.capture, known, train=True)[1].peak_bytes <= known


def test_the_papers_policy_and_rates_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = net()
    budget, seen, real = bytes_of(module, x)[0] // 2, list[CostModel](), planned.choose_chunks

    def choose(*args: Any, costs: CostModel, **how: Any) -> Any:
        seen.append(costs)
        return real(*args, costs=costs, **how)

    monkeypatch.setattr(planned, "choose_chunks", choose)
    rates = replace(CPU_CORE, memory_bytes=1e9)
    lightning_amp.chunk(module, x, budget=budget)
    paper = lightning_amp.chunk(module, x, budget=budget, policy="paper", rates=rates)
    assert seen == [CostModel(), CostModel(policy="paper", rates=rates)]
    found, y = bytes_of(paper, x)
    assert found <= budget
    close(y, module(x))
    with pytest.raises(PlanError, match="policy='fast' is not supported; allowed are"):
        lightning_amp.chunk(module, x, policy="fast")


def test_parameters_names_and_state_are_the_modules_own() -> None:
    module, x = net()
    module.register_buffer("offset", torch.zeros(1, dtype=torch.float64))
    small = lightning_amp.chunk(module, x, budget="100KiB")
    assert isinstance(small, Net)
    assert list(small.state_dict()) == list(module.state_dict())
    for (name, own), (other, right) in zip(small.named_parameters(), module.named_parameters(), strict=True):
        assert name == other
        assert own is right
    assert small.offset is module.offset
    assert "forward" not in vars(module)
    assert small.layers[0] is not module.layers[0]
    # an attribute that would be hidden is refused
    module, x = net()
    module.plan = "mine"  # type: ignore[assignment]
    with pytest.raises(ModelError, match="an attribute 'plan', a name that the chunked module uses"):
        lightning_amp.chunk(module, x)
    again, x = net()
    small = lightning_amp.chunk(again, x)
    with pytest.raises(ModelError, match="an attribute 'forward', a name that the chunked module uses"):
        lightning_amp.chunk(small, x)


def test_gradients_are_the_modules_own() -> None:
    module, x = net()
    small = lightning_amp.chunk(module.train(), x, budget="100KiB")
    x.requires_grad_()
    weights = torch.randn(x.shape, dtype=x.dtype)
    named = [x, *module.parameters()]
    found = torch.autograd.grad((small(x) * weights).sum(), named)
    right = torch.autograd.grad((module(x) * weights).sum(), named)
    close(found, right)
    assert len(overrides_of(small)[0].run.known) == 2


@pytest.mark.parametrize("mode", ["inference", "eval", "autocast", "frozen", "float32", "longer", "flag"])
def test_another_signature_is_planned_anew(mode: str) -> None:
    module, x = net()
    small = lightning_amp.chunk(module, x, budget="100KiB")
    known = overrides_of(small)[0].run.known
    if mode == "inference":
        with torch.inference_mode():
            close(small(x), module(x))
        assert len(known) == 1
        return
    with torch.no_grad():
        if mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                small.float(), module.float()
                assert torch.equal(small(x.float()), module(x.float()))
        elif mode == "eval":
            small.train(), module.train()
            close(small(x), module(x))
        elif mode == "frozen":
            module.requires_grad_(False)
            close(small(x), module(x))
        elif mode == "float32":
            module.float()
            small.float()
            torch.testing.assert_close(small(x.float()), module(x.float()))
        elif mode == "longer":
            longer = torch.randn(2, 50, 16, dtype=x.dtype)
            close(small(longer), module(longer))
            assert bytes_of(small, longer)[0] <= 100 * 1024
        else:
            small.layers[0][0].heads = module.layers[0][0].heads = 4
            close(small(x), module(x))
    assert len(known) == 2


def test_copies_code_and_longer_inputs_of_a_chunked_module() -> None:
    module, x = net()
    small = lightning_amp.chunk(module, x, budget="100KiB")
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0)
            assert torch.equal(twin(x), x)
    assert not torch.equal(small(x), x)
    # the code is python that one can read
    code = show_code(small)
    assert code == show_code(small.plan)
    assert code.startswith("# the whole module\n# ")
    compile(code, "shown", "exec")
    assert "def region_0(put, size, " in code
    assert "torch.softmax(" in code
    assert "def forward(layers_0_0_norm_weight, " in code
    with pytest.raises(ModelError, match="'Net' has no generated code"):
        show_code(module)
    # a longer input that does not fit is refused when it comes
    with torch.no_grad(), pytest.raises(PlanError, match="at least"):
        small(torch.randn(20, 48, 16, dtype=x.dtype))


@pytest.mark.parametrize("kind", [Buffer, Nested, Shared])
def test_nasty_modules_are_exact(kind: type[nn.Module]) -> None:
    """A buffer that changes, nested results, a layer used twice, parameters without a gradient."""
    torch.manual_seed(0)
    module = kind().double()
    right = copy.deepcopy(module)
    x = x_of(6, DIM).detach().double()
    small = lightning_amp.chunk(module, x, budget=6 * DIM * 8 * 3)
    for _ in range(2):
        found, expected = small(x), right(x)
        close(found["a"][0] if kind is Nested else found, expected["a"][0] if kind is Nested else expected)
    for own, other in zip(module.buffers(), right.buffers(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ByValue, "which cannot be captured: .*[dD]ata|nor does it run on fake tensors"),
        (Custom, "the autograd Function 'Scale'"),
    ],
)
def test_what_cannot_be_captured_is_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        lightning_amp.chunk(kind(), x_of(3, DIM).detach(), budget="1MiB")(x_of(3, DIM))


class Outer(Net):
    """No graph as a whole: a hook on its last layer."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.last = nn.Linear(16, 16)
        self.seen: list[Any] = []
        self.last.register_forward_hook(Note(self.seen))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


class Note:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.seen.append(tuple(result.shape))


def outer() -> tuple[Outer, Tensor]:
    torch.manual_seed(0)
    return Outer().double().eval(), torch.randn(2, 48, 16, dtype=torch.float64)


def test_where_the_whole_is_no_graph_its_blocks_are() -> None:
    module, x = outer()
    whole, right = bytes_of(module, x)
    small = lightning_amp.chunk(module, x, budget=whole // 2)
    found, y = bytes_of(small, x)
    assert small.plan.peak_bytes == found <= whole // 2
    assert small.plan.whole_bytes == whole
    assert "has hooks" in small.plan.reasons[""]
    assert sorted(small.plan.regions) == ["layers.0", "layers.1"]
    assert "# layers.0\n" in show_code(small)
    close(y, right)
    assert small.seen == 2 * [(2, 48, 16)]
    assert all("forward" not in vars(child) for child in small.layers)
    # blocks have exact gradients
    small = lightning_amp.chunk(module, x, budget=bytes_of(module, x)[0] // 2)
    x.requires_grad_()
    named = [x, *module.parameters()]
    grads = (torch.autograd.grad(run(x).sin().sum(), named) for run in (small, module))
    for own, other in zip(*grads, strict=True):
        close(own, other)


def test_too_little_for_blocks_is_refused() -> None:
    text = "requires at least .* when its block 'layers.1' begins 12.0 KiB are alive outside of it"
    names_the_least(*outer(), text, "20KiB", "10KiB")


class Chooses(Outer):
    """Between its blocks it depends on values: the run on fake tensors has seen one way only."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x if isinstance(x, torch._subclasses.FakeTensor) or x.sum() < 1e9 else x[:1]
        return self.last(x)


def test_a_block_that_is_called_otherwise_than_planned_is_an_error() -> None:
    torch.manual_seed(0)
    module, x = Chooses().eval(), torch.randn(2, 48, 16)
    small = lightning_amp.chunk(module, x, budget="100KiB")
    close(small(x), module(x))
    with torch.no_grad(), pytest.raises(ModelError, match="the block 'layers.1' .* was called with other shapes"):
        small(x + 1e9)


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.exp(), 0.5, self.training).tanh()


def test_active_dropout_draws_what_it_would_draw() -> None:
    x = torch.randn(64, 1000)
    small = lightning_amp.chunk(Dropping(), x, budget=64 * 1000 * 4 * 4)
    torch.manual_seed(1)
    found = small(x), torch.manual_seed(1)
    torch.testing.assert_close(found[0], Dropping()(x))


def test_hooks_around_a_chunked_module_run() -> None:
    module, x = outer()
    whole, _ = bytes_of(module, x)
    seen: list[Any] = []
    module.layers[0].register_forward_hook(Note(seen))
    module.register_forward_hook(Note(seen))
    small = lightning_amp.chunk(module, x, budget=whole // 2)
    assert sorted(small.plan.regions) == ["layers.0", "layers.1"]
    small.layers[0]._forward_hooks.popitem()
    small.layers[0].register_forward_hook(Note(seen))
    small.register_forward_hook(Note(seen))
    small(x)
    assert seen == 2 * [(2, 48, 16)]
