"""Claim: a budget of compiled graphs changes no loss and no gradient, its bytes are counted as they are, and what it
does not support is refused by name.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_amp._torch import compile_context
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.installing.install import install_rules
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.compiled_budget.partition import partitioned_within
from lightning_amp.techniques.compiled_budget.row import SHARES, CompiledBudget
from tests.lightning.strategy.strategy_cases import fitted

ROWS = 64
# Dynamo reads `.grad` of what a module is called with; TorchInductor imports a deprecated part of torch
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class Block(nn.Module):
    """A user's module, which torch.compile follows also where it is compiled in place."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(64)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(self.norm(nn.functional.gelu(self.up(x)))))  # type: ignore[no-any-return]


class Net(LightningModule):
    """Blocks, compiled as one, or one by one in place."""

    def __init__(self, how: str = "wrapped", dropout: float = 0.0, backend: Any = "aot_eager") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(*(Block(dropout) for _ in range(3)))
        if how == "wrapped":
            self.net = torch.compile(self.net, backend=backend)
        for block in self.net if how == "in place" else ():
            block.compile(backend=backend)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), foreach=False)


class Breaks(Net):
    """Its compiled module has two graphs."""

    def __init__(self) -> None:
        super().__init__("no")
        self.net = torch.compile(Prints(), backend="aot_eager")


class Prints(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return 2 * x


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rule(share: float) -> Rule:
    return Rule(strategy="compiled_budget", fqn="", spec=CompiledBudget(share=share), why="tested")


def rows() -> Tensor:
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))


def one_step(share: float | None, how: str, dropout: float, backend: Any = "aot_eager") -> list[Tensor]:
    """Loss, gradients and random state of a step in float64."""
    torch._dynamo.reset()
    module = Net(how, dropout, backend).double()
    if share is not None:
        install_rules(module, [rule(share)])
    torch.manual_seed(2)
    loss = module.training_step(rows().double(), 0)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None), torch.get_rng_state()]


def measured(share: float, how: str, backend: Any = "aot_eager") -> int:
    """Most bytes in the second step, of all allocations of the process."""
    torch._dynamo.reset()
    # a collection while it is profiled would count what was made before as freed
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        batch, module = rows(), Net(how, backend=backend)
        install_rules(module, [rule(share)])
        optimizer = module.configure_optimizers()
        for _ in range(2):
            with torch.profiler.record_function("a step"):
                loss = module.training_step(batch, 0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                del loss
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    start = max(event.start_ns() for event in events if event.name() == "a step")
    now = peak = 0
    for at, n_bytes in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        now += n_bytes
        peak = max(peak, now) if at >= start else peak
    return peak


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_budget_changes_no_gradient_and_no_random_state(how: str, dropout: float) -> None:
    plain = one_step(None, how, dropout)
    for share in (1.0, 0.25, SHARES[-1]):
        found = one_step(share, how, dropout)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_the_bytes_of_compiled_graphs_are_counted(how: str) -> None:
    peaks = list[int]()
    for share in (1.0, 0.25):
        module = Net(how)
        installed = install_rules(module, [rule(share)])
        peaks.append(profile_module(module, rows()).peak_bytes)
        installed.undo()
        found = measured(share, how)
        assert abs(peaks[-1] - found) <= 0.005 * found
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.full
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_buffers_of_inductor_are_counted(share: float) -> None:
    module = Net(backend="inductor")
    installed = install_rules(module, [rule(share)])
    peak = profile_module(module, rows()).peak_bytes
    installed.undo()
    found = measured(share, "wrapped", "inductor")
    assert abs(peak - found) <= 0.005 * found


@pytest.mark.full
def test_a_count_with_inductor_needs_no_cache_and_leaves_the_processor_known(tmp_path: Path) -> None:
    probe = (
        "from tests.techniques.compiled_budget.test_compiled_budget import *\n"
        "module = Net(backend='inductor'); install_rules(module, [rule(0.25)])\n"
        "assert profile_module(module, rows()).peak_bytes\n"
        "from torch._inductor.cpu_vec_isa import valid_vec_isa_list\n"
        "found = valid_vec_isa_list(); valid_vec_isa_list.cache_clear(); assert found == valid_vec_isa_list(), found\n"
    )
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-W", "ignore", "-c", probe], check=True, env=environment)


@pytest.mark.full
def test_inductor_with_a_budget_draws_each_number_once() -> None:
    plain = one_step(1.0, "wrapped", 0.5, "inductor")
    for one, other in zip(one_step(0.01, "wrapped", 0.5, "inductor"), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_count_leaves_no_setting_behind() -> None:
    from torch._functorch import config

    module = Net()
    before = compile_context(module.net)
    install_rules(module, [rule(0.25)])
    profile_module(module, rows())
    assert compile_context(module.net) is before
    assert config.activation_memory_budget == 1.0
    with partitioned_within(0.5):
        assert config.activation_memory_budget == 0.5


def test_the_fastest_budget_that_fits_is_taken_and_offline_as_in_a_fit() -> None:
    import lightning_amp

    lightest = lightning_amp.plan(Net(), rows(), device_memory="60KiB", strategies="compiled_budget").plan
    budget = lightest.predicted_peak_bytes
    assert lightest.spec_of("compiled_budget") != CompiledBudget(share=1.0)
    own = AMPStrategy(strategies="compiled_budget", device_memory=budget)
    found = fitted(Net(), DataLoader(rows().repeat(2, 1), batch_size=ROWS), own)
    assert own.plan is not None
    assert own.plan.fits
    assert own.plan.predicted_peak_bytes == budget
    torch._dynamo.reset()
    plain = fitted(Net(), DataLoader(rows().repeat(2, 1), batch_size=ROWS), "auto")
    for name, parameter in plain["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], parameter)


@pytest.mark.parametrize(
    ("module", "why"),
    [(Net("no"), "no module is compiled"), (Breaks(), "does not compile to one graph")],
    ids=["nothing", "a graph break"],
)
def test_what_is_not_supported_is_refused_by_name(module: Net, why: str) -> None:
    import lightning_amp

    with pytest.raises(AmpError, match=why):
        lightning_amp.plan(module, rows(), device_memory="60KiB", strategies="compiled_budget")
