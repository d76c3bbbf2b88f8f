"""Claim: the predicted peak of a rank under fsdp is that of the meter; what is gathered together is every parameter
once; what is not supported is refused.
"""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.utils.data import DataLoader

from lightning_amp.costs.profiled_step import HELD
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.find_blocks import blocks_with_own_parameters
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.fsdp.bytes_of_ranks import fsdp_peak_bytes
from lightning_amp.techniques.fsdp.fully_sharded import FullySharded, refuse_swapped
from lightning_amp.techniques.fsdp.look import refuse, units_of
from tests.any_module import Meter, make
from tests.lightning.strategy.fsdp_features import Blocks, Found, Several, ways
from tests.lightning.strategy.strategy_cases import EVEN, Case, trainer_of
from tests.lightning.strategy.test_fsdp import close
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.chunk.small_blocks import Attention

NAMES = ("wide_mlp", "gene_transformer", "stack")
ADDED_UP = {1: NAMES, 2: ("wide_mlp", "stack")}


class Stack(Optimised, by=torch.optim.Adam):
    def __init__(self, dim: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, dim), nn.Linear(dim, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


class Attentive(Stack):
    """Blocks with parameters and tensors of similar size, which recompute and chunks make smaller."""

    def __init__(self, dim: int = 96, layers: int = 6) -> None:
        super().__init__(dim, 0)
        self.blocks = nn.ModuleList(Attention(dim) for _ in range(layers))


def module_and_batch(name: str) -> tuple[LightningModule, Any]:
    if name == "stack":
        torch.manual_seed(0)
        return Stack(), torch.randn(16, 32)
    return make(name)


def fit(
    rank: int, ranks: int, strategy: AMPStrategy, module: LightningModule, loader: Any, added_up: int = 1
) -> tuple[Meter, ModuleProfile]:
    """Train a module; the meter of its second step, and what the monitor has measured."""
    meter, monitor = Meter(added_up), StratumMemoryMonitor(dirpath=mkdtemp(), plot=False)
    options = {"use_distributed_sampler": False, "max_steps": -1, "accumulate_grad_batches": added_up}
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, callbacks=[meter, monitor], **options)
    trainer.fit(module, loader)
    assert monitor.measured_step is not None
    return meter, monitor.measured_step


def measured(
    rank: int, ranks: int, names: Sequence[str] = NAMES, *, fsdp_ranks: int | None = None, added_up: int = 1
) -> dict[str, int]:
    """Bytes of every module's second step; a body for ranks. What is kept after it is what the plan says, by kind."""
    found = {}
    for name in names:
        module, batch = module_and_batch(name)
        strategy = AMPStrategy(strategies="fsdp", fsdp_ranks=fsdp_ranks)
        loader = DataLoader([batch] * 2 * added_up, batch_size=None)  # type: ignore[arg-type]
        meter, step = fit(rank, ranks, strategy, module, loader, added_up)
        found[name] = meter.live.peak
        kept = step.timeline[-1].by_kind
        assert strategy.plan is not None
        held = sum(kept[kind] for kind in HELD)
        assert held == pytest.approx(strategy.plan.predicted_base_bytes, rel=0.02), f"{name}: {kept}"
    return found


def measured_both(rank: int, ranks: int) -> dict[int, dict[str, int]]:
    """Steps of one batch, and of two whose gradients are added up."""
    return {n: measured(rank, ranks, names, added_up=n) for n, names in ADDED_UP.items()}


@pytest.mark.ranks
def test_the_predicted_peak_is_the_measured_one(tmp_path: Path) -> None:
    peaks = run_ranks(measured_both, 2, tmp_path, timeout=240)
    for added_up, name in ((n, name) for n, names in ADDED_UP.items() for name in names):
        module, batch = module_and_batch(name)
        run_settings = RunSettings(accumulate_grad_batches=added_up, frees_gradients=added_up == 1)
        profile = profile_module(module, batch, run_settings=run_settings)
        predicted = fsdp_peak_bytes(profile, units_of(module), 2)
        most = max(found[added_up][name] for found in peaks)
        assert abs(predicted - most) <= 0.05 * most, f"{name}: predicted {predicted:,}, measured {most:,}"
        assert most < profile.peak_bytes, "less than on one device"


def within(rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """Predicted bytes, those of the meter and of the monitor, of all techniques; then with no byte more as a budget."""
    found, options = [], dict[str, Any](strategies="fsdp,recompute,chunk")
    for _ in range(2):
        torch.manual_seed(0)
        strategy = AMPStrategy(**options)
        loader = DataLoader(torch.randn(6, 256, 32), batch_size=2)  # type: ignore[arg-type]
        meter, step = fit(rank, ranks, strategy, Attentive(), loader)
        assert strategy.plan is not None
        assert {rule.strategy for rule in strategy.plan.rules} >= {"fsdp", "recompute", "chunk"}
        predicted = strategy.plan.predicted_peak_bytes
        options = {"plan": strategy.plan, "device_memory": predicted}
        found.append((predicted, meter.live.peak, step.peak_bytes))
    return found


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.release
def test_what_all_techniques_need_together_is_predicted_and_enough(tmp_path: Path) -> None:
    """The second run may have what was predicted, and no byte more."""
    for predicted, metered, monitored in chain(*run_ranks(within, 2, tmp_path, timeout=240)):
        assert predicted == pytest.approx(metered, rel=0.05)
        assert metered <= predicted
        assert metered == monitored


def test_a_step_by_hand_is_refused_where_its_gradients_are_elsewhere() -> None:
    refuse(Several(), {})
    refuse(Blocks(), {}, by_hand=False)
    with pytest.raises(InstallError, match="fsdp_offload=True is not supported: 'Several' has"):
        refuse(Several(), {}, by_hand=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


def steps(module: Any, x: torch.Tensor, sharded: FullySharded | None = None) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = module.training_step(x)
        if sharded is None:
            loss.backward()
        else:
            with sharded.backward(loss):
                loss.backward()
            sharded.before_update()
        optimizer.step()


def as_an_accelerator(rank: int, ranks: int) -> float:
    torch.manual_seed(0)
    module, x = Net().double(), torch.randn(4, 6, dtype=torch.float64)
    plain = copy.deepcopy(module)
    steps(plain, x)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    sharded = FullySharded(module, ["blocks.*", ""], mesh)
    # torch moves the arguments of a forward where the device has this name
    named = mock.patch("torch._C._get_privateuse1_backend_name", mock.Mock(return_value="cpu"))
    vars(module)["training_step"] = named(module.training_step)
    steps(module, x, sharded)
    for parameter in sharded.sharded:
        parameter.restore()
    sharded.undo()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


def copied(rank: int, ranks: int) -> list[str]:
    """What copies of a block, of a list of blocks and of the module end with, and those of the module after `undo`."""
    module, said = Net(), []
    sharded = FullySharded(module, ["blocks.*", ""], init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",)))
    for given in (module.blocks[1], module.blocks, module):
        with pytest.raises(ModelError) as error:
            copy.deepcopy(given)
        said.append(str(error.value))
    for parameter in sharded.sharded:
        parameter.restore()
    sharded.undo()
    twin = copy.deepcopy(module)
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), module.parameters(), strict=True))
    return said


@pytest.mark.ranks
def test_a_copy_of_what_is_split_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_ranks(copied, 2, tmp_path):
        for text, name in zip(said, ("'blocks.1'", "'blocks.0'", "the module"), strict=True):
            assert f"under fsdp {name} was copied (copy.deepcopy)" in text


@pytest.mark.ranks
def test_a_step_without_arguments_runs_where_torch_moves_them(tmp_path: Path) -> None:
    assert max(run_ranks(as_an_accelerator, 2, tmp_path)) < 1e-12


def test_a_block_that_shares_a_parameter_is_left_to_the_root() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])
    module.head = nn.Linear(3, 3)
    module.head.weight = module.blocks[1].weight  # type: ignore[union-attr,assignment]
    assert list(blocks_with_own_parameters(module)) == ["blocks.0", "blocks.3"]
    names = {unit.fqn: [parameter.name for parameter in unit.parameters] for unit in units_of(module)}
    assert names == {
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.3": ["blocks.3.weight", "blocks.3.bias"],
        "": ["blocks.1.weight", "blocks.1.bias", "head.bias"],
    }


def test_norms_of_whole_gradients_are_refused() -> None:
    class Logged(Blocks):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, 2))

    class Named(Blocks):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.grad_norm = self.trainer.strategy.gradient_norm()  # type: ignore[attr-defined]

    refuse(Named(), {})
    with pytest.raises(InstallError, match=r"'grad_norm' in on_before_optimizer_step of 'Logged'.*gradient_norm\(\)"):
        refuse(Logged(), {})


def test_a_block_that_is_called_with_other_parameters_is_refused() -> None:
    block, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3)
    block.register_forward_pre_hook(partial(refuse_swapped, "blocks.0"), prepend=True)
    block(x)
    with pytest.raises(ModelError, match=r"'blocks.0' is called with other parameters than its own"):
        functional_call(block, {name: 2 * p for name, p in block.named_parameters()}, (x,))


# Claim: blocks that `module.compile()` has compiled in place train under fsdp as they do on one process.

CALLS = list[object]()


class Block(nn.Module):
    """torch compiles no Sequential in place."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.wide(x).tanh())


class Compiled(Blocks):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3)).double()
        for block in self.blocks if in_place else ():
            block.compile(backend=compiled)


def compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
    CALLS.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def trained(rank: int | None, ranks: int) -> Found:
    torch.compiler.reset()
    CALLS.clear()
    cases = {name: Case(partial(Compiled, name == "compiled"), cells=EVEN) for name in ("plain", "compiled")}
    found = ways(rank, ranks, cases)
    assert CALLS, "blocks were compiled"
    return found


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_train_as_on_one_process(tmp_path: Path) -> None:
    one = trained(None, 1)
    for rank, found in enumerate(run_ranks(trained, 2, tmp_path)):
        for name, state in found.items():
            close(state, one[name], f"{name}, rank {rank}")
