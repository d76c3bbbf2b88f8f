"""Claim: compiled blocks train as they do eagerly, share their graphs, and are refused by name where they cannot be."""

import re
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.footprint.chain.chain import BlockCost, Chain
from lightning_amp.footprint.forward_overrides import Override, Position, add_override
from lightning_amp.installing.install import install_rules
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.compile import blocks as technique
from lightning_amp.techniques.compile.choose import blocks_to_compile
from lightning_amp.techniques.logits.row import RULE as LOGITS
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.lightning.strategy.strategy_cases import fitted

# torch's own, of what it looks at while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
RECOMPUTE = Rule(strategy="recompute", fqn="net.*", spec=RecomputeBlock(), why="tested")


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.dropout = nn.Linear(8, 32), nn.Linear(32, 8), norm(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Prints(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Net(LightningModule):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head = nn.Sequential(*(blocks or (Block(), Block(), Block()))), nn.Linear(8, 80)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.net(batch)), torch.arange(len(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def rows(n: int = 6) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(1))


def two_steps(*rules: Rule, compiles: bool) -> list[Tensor]:
    """Losses, gradients, parameters and random state of two steps in float64."""
    module = Net().double()
    install_rules(
        module,
        [
            *rules,
            *(
                blocks_to_compile(module, True, (), shared=False, budgeted=False, chain=None, steps=1)[0]
                if compiles
                else ()
            ),
        ],
    )
    optimizer, losses = module.configure_optimizers(), []
    torch.manual_seed(2)
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(module.training_step(rows().double().requires_grad_(), 0))
        losses[-1].backward()
        optimizer.step()
    return [*losses, *(p.grad for p in module.parameters() if p.grad is not None), *module.parameters()]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    technique._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    technique._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run their operators: what TorchInductor makes of them is tested by itself."""

    def compiled(forward: Callable[..., Any], sizes: object) -> Callable[..., Any]:
        return torch.compile(forward, fullgraph=True, backend="aot_eager")

    monkeypatch.setattr(technique, "_compiled", compiled)


def assert_equal(*rules: Rule) -> None:
    found = two_steps(*rules, compiles=True)
    state = torch.get_rng_state()
    expected = two_steps(*rules, compiles=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kernels_train_as_eager_blocks_and_draw_the_same_numbers() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    assert_equal()
    # of three blocks, whose inputs all require gradients
    assert counters["stats"]["unique_graphs"] == 1


def test_beside_recompute_and_logits(without_kernels: None) -> None:
    assert_equal(RECOMPUTE, LOGITS)


def test_a_graph_break_is_named(without_kernels: None) -> None:
    module = Net(Block(), Prints())
    install_rules(module, blocks_to_compile(module, True, (), shared=False, budgeted=False, chain=None, steps=1)[0])
    with pytest.raises(InstallError, match=r"net\.1 \(Prints\) does not compile to one graph: .*graph_break"):
        module.training_step(rows(), 0)


def test_another_technique_in_a_block_is_named(without_kernels: None) -> None:
    module = Net()
    install_rules(module, blocks_to_compile(module, True, (), shared=False, budgeted=False, chain=None, steps=1)[0])
    block = module.net[0]
    assert isinstance(block, Block)
    add_override("net.0.norm", block.norm, Override("other", lambda run, m, x: run(m, x), Position.STATISTICS))
    with pytest.raises(InstallError, match=r"net\.0 \(Block\) cannot be compiled: its 'norm' is computed by other"):
        module.training_step(rows(), 0)


def test_what_the_user_compiled_stays() -> None:
    module = Net(torch.compile(Block()), Block())
    rules, note = blocks_to_compile(module, True, (), shared=False, budgeted=False, chain=None, steps=1)
    assert [rule.fqn for rule in rules] == ["net.1"]
    assert note.startswith("compiles 1 block (requested by the user); bytes are those of the eager step")


@pytest.mark.parametrize(
    ("blocks", "others", "message"),
    [
        ([nn.Linear(8, 8)], (), "the module has no blocks with submodules"),
        ([Block()], ("offload",), "together with offload"),
        ([Block(nn.BatchNorm1d)], (), "ranks share the batch statistics of 'net.0'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(blocks: list[nn.Module], others: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        blocks_to_compile(Net(*blocks), True, others, shared=True, budgeted=False, chain=None, steps=1)
    rules, note = blocks_to_compile(
        Net(*blocks), "auto", others, shared=True, budgeted=False, chain=Chain(blocks=()), steps=1
    )
    assert not rules
    assert message in note


def test_a_named_budget_is_refused() -> None:
    with pytest.raises(PlanError, match="compile=True is not supported: device_memory is given, and what compiled"):
        blocks_to_compile(Net(), True, (), shared=False, budgeted=True, chain=None, steps=1)


def chain(work: float) -> Chain:
    """Blocks that are two thirds of a step with 12 ms of launches."""
    blocks = tuple(BlockCost(fqn=f"net.{k}", forward_seconds=(0.012 + work) * 2 / 27, saved_bytes=0) for k in range(3))
    return Chain(blocks=blocks, seconds=0.012 + work, launch_seconds=0.012)


@pytest.mark.parametrize(
    ("seen", "steps", "compiled", "said"),
    [
        (chain(0.002), inf, True, "the run has no end, and compilation takes about 30.0 s"),
        # half of the launches are left, 6 ms a step are saved
        (chain(0.002), 10_000, True, "10,000 steps save about 60.0 s, and compilation takes about 30.0 s"),
        (
            chain(0.002),
            1_000,
            False,
            "compile='auto' compiles nothing: launches take 12.0 ms of a step, .* save about 6.00 s",
        ),
        (chain(0.02), 10_000, False, "launches take 12.0 ms of a step, and arithmetic and bytes 20.0 ms$"),
        (None, 10_000, False, "^$"),
    ],
)
def test_auto_compiles_where_launches_bind_and_the_run_is_long(
    seen: Chain | None, steps: float, compiled: bool, said: str
) -> None:
    rules, note = blocks_to_compile(Net(), "auto", (), shared=False, budgeted=False, chain=seen, steps=steps)
    assert bool(rules) == compiled
    assert re.search(said, note), note


def test_auto_without_a_run_is_for_a_long_one_on_the_named_device() -> None:
    for rates, names in ((None, ()), ("H100", ("compile",))):
        made = lightning_amp.plan(Net(), rows(6), rates=rates, compile="auto").plan
        assert made.strategies == names
        assert any("the run has no end" in note for note in made.notes) == bool(names)
    with pytest.raises(PlanError, match="compile=True is not supported: device_memory is given"):
        lightning_amp.plan(Net(), rows(6), device_memory="1GiB", compile=True)


def test_auto_without_a_run_leaves_requested_techniques_alone_as_in_a_fit() -> None:
    for request in ({"strategies": "recompute"}, {"policy": "paper"}):
        made = lightning_amp.plan(Net(), rows(6), rates="A100", compile="auto", **request).plan
        assert "compile" not in made.strategies, request
        assert not any("compile" in note for note in made.notes)


def test_a_fit_compiles_and_auto_does_not_on_a_cpu(without_kernels: None) -> None:
    loader = DataLoader(rows(24), batch_size=6)  # type: ignore[arg-type]
    plain, auto, compiled = (
        fitted(Net(), loader, AMPStrategy(compile=asked), max_steps=2) for asked in (False, "auto", True)
    )
    assert auto["plan"].strategies == plain["plan"].strategies == ()
    assert compiled["plan"].strategies == ("compile",)
    assert compiled["plan"].predicted_peak_bytes == plain["plan"].predicted_peak_bytes
    assert torch.equal(compiled["random"][0], plain["random"][0])
    torch.testing.assert_close(compiled["parameters"], plain["parameters"])
    offline = lightning_amp.plan(Net(), rows(6), compile=True).plan
    assert offline.rules == compiled["plan"].rules
    assert offline.predicted_peak_bytes == compiled["plan"].predicted_peak_bytes
    with pytest.raises(PlanError, match="the given plan compiles blocks, which is not supported: device_memory is"):
        fitted(Net(), loader, AMPStrategy(plan=compiled["plan"], device_memory="1GiB"), max_steps=1)
