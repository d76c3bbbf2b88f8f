"""Claim: parameters and buffers that ranks should have in common and have not are told, with the ranks, before a
validation, in a save and at the end; rounding, shards of the model axis, what is nan everywhere and buffers that may
differ are not told.
"""

import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_amp.errors import PlanError
from lightning_amp.lightning.consistency.same_parameters import warn_of_differences
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from tests.lightning.strategy.model_axis_cases import Batch, Maps, loader_of, trainer_of
from tests.ranks import run_ranks
from tests.verification.verify_cases import RunningScale, Scaled, SharedScale, cells

pytestmark = pytest.mark.ranks

KINDS: dict[str, Tensor] = {
    "a": torch.tensor([[1.0, -4.0], [0.5, 2.0]]),
    "bf16": torch.tensor([1.0, -4.0]).bfloat16(),
    "integer": torch.tensor([1, -4]),
    "complex": torch.tensor([1.0 + 1j, -4.0]),
    "scalar": torch.tensor(4.0, dtype=torch.float64),
    "turned": torch.tensor([[1.0, -4.0, 3.0], [0.5, 2.0, 3.0]]).T,
    "nothing": torch.ones(0, 3),
    "nan": torch.tensor([torch.nan, 4.0]),
    "infinite": torch.tensor([torch.inf, 4.0]),
    "shard": torch.ones(2),
}


def holder(*, by: float) -> nn.Module:
    """Holds `running`, which is told where it differs, and everything that is not."""
    module = nn.Module()
    module.register_buffer("running", torch.full((3, 2), 4.0).T + by)
    module.register_buffer("cache", torch.zeros(2) + by, persistent=False)
    module.register_buffer("counter", torch.tensor(3) + int(by))
    module.register_buffer("generator", torch.Generator().manual_seed(int(by)).get_state())
    module.register_buffer("sparse", torch.eye(2).to_sparse() * (by + 1))
    module.add_module("norm", nn.BatchNorm1d(2))
    module.norm.running_mean += by
    module.add_module("metric", Kept())
    module.metric.edges += by
    module.metric.update(by)
    return module


class Kept(torchmetrics.MeanMetric):
    """Keeps its state in checkpoints, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.persistent(True)
        self.register_buffer("edges", torch.zeros(2))


def looks(rank: int, ranks: int) -> dict[str, str]:
    """What rank 0 says of a 2 x 2 mesh, by case; a case changes the first entry of one parameter on one rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    # by how much, on which rank, of which parameter
    cases: dict[str, list[tuple[float, int, str]]] = {"as they were": []}
    for name in set(KINDS) - {"nothing", "shard", "nan", "infinite"}:
        cases[name] = [(1.0, 3, name)]
    cases |= {
        "rounding": [(1e-7, 3, "a"), (3e-6, 2, "scalar"), (2**-7, 1, "bf16")],
        "two": [(1.0, 3, "a"), (0.5, 1, "a"), (2.0, 2, "scalar")],
        "the first": [(1.0, 0, "a")],
        "shard of another data rank": [(1.0, 3, "shard")],
        "nan on one": [(torch.nan, 2, "a")],
        "finite on one": [(-torch.inf, 2, "infinite")],
        "buffers": [],
        "shared": [],
    }
    found = {}
    for case, changes in cases.items():
        held = {
            name: nn.Parameter(value.clone(), requires_grad=value.is_floating_point()) for name, value in KINDS.items()
        }
        held["shard"].data += rank % 2
        for by, where, name in changes:
            if rank == where:
                value = held[name].data
                value[(0,) * value.dim()] += torch.tensor(by, dtype=value.dtype)
        module = nn.Module()
        for name, parameter in held.items():
            module.register_parameter(name, parameter)
        module.add_module("within", holder(by=float(rank) if case == "buffers" else 0.0))
        if case == "shared":
            share_batch_statistics(module, mesh["data"])
            module.within.norm.running_mean += 1 + rank
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_of_differences(module, [SimpleNamespace(shard=held["shard"], in_place=False)], mesh, step=7)
        found[case] = "".join(str(w.message) for w in told)
    return found


def test_what_differs_is_named_with_its_ranks(tmp_path: Path) -> None:
    first, *others = run_ranks(looks, 4, tmp_path)
    assert not any(text for other in others for text in other.values()), "rank 0 says it"
    assert first.pop("as they were") == first.pop("rounding") == ""
    assert all(text.startswith("after step 7, ") for text in first.values())
    for name in ("a", "bf16", "integer", "complex", "scalar", "turned"):
        assert f"'{name}' by 2.5e-01, on ranks [3]" in first[name]
    assert "'scalar' by 5.0e-01, on ranks [2]; 'a' by 2.5e-01, on ranks [1, 3]." in first["two"]
    assert "'a' by 2.5e-01, on ranks [1, 2, 3]" in first["the first"]
    assert "'shard' by 5.0e-01, on ranks [3]" in first["shard of another data rank"]
    assert "'a' by nan, on ranks [2]" in first["nan on one"]
    assert "'infinite' by nan, on ranks [2]" in first["finite on one"]
    assert "buffers differ between ranks" in first["buffers"]
    assert "first such rank's largest entry): 'within.running' by 7.5e-01, on ranks [1, 2, 3]." in first["buffers"]
    assert "sum its terms and its number of samples over the ranks" in first["buffers"]
    assert "parameters" not in first["buffers"]
    assert "batch statistics differ" in first["shared"]
    assert "a fault of lightning_amp" in first["shared"]
    assert "sum its terms" not in first["shared"]


ALSO = ("validates", "saves", "nothing")


class ByHand(Maps):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        found = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        norm = strategy.gradient_norm() if self.asks else found
        nn.utils.clip_grads_with_norm_(self.parameters(), 0.1, norm)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SCALERS = {"own": RunningScale, "shared": SharedScale}


def told(rank: int, ranks: int, strategies: str, module: Any, batches: list[Any], also: str, folder: Path) -> set[str]:
    """What a run says of differences between ranks."""
    strategy = AMPStrategy(strategies=strategies, model_parallel_size=ranks if strategies == "S2" else 1)
    options = {"default_root_dir": folder, "max_epochs": 1 if strategies == "S2" else 2}
    saves, validates = also == "saves", also == "validates"
    trainer = trainer_of(rank, ranks, strategy, enable_checkpointing=saves, limit_val_batches=int(validates), **options)
    loader = partial(DataLoader, batches, batch_size=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(), loader() if validates else None)
    return {text for w in caught if "differ between ranks" in (text := str(w.message))}


def scaled(rank: int, ranks: int, kind: str, also: str, folder: Path) -> tuple[set[str], dict[str, Tensor]]:
    """With a running scale: what is said, and the trained state."""
    rows = slice(None) if ranks == 1 else slice(6 * rank, 6 * rank + 6)
    module = Scaled(SCALERS[kind]()).double()
    batches = [{name: part[rows].double() for name, part in cells(12, seed=s).items()} for s in range(3)]
    said = told(rank, ranks, "S1", module, batches, also, folder)
    return said, {name: value.clone() for name, value in module.state_dict().items()}


def chosen(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """What a fit whose plan the policy chooses says of a running scale."""
    found = {}
    for kind, scaler in (SCALERS | {"late": partial(RunningScale, late=True)}).items():
        batches = [{n: v.double() for n, v in cells(6, seed=s + 9 * rank).items()} for s in range(3)]
        trainer = trainer_of(rank, ranks, AMPStrategy(), max_epochs=1, default_root_dir=folder)
        try:
            trainer.fit(Scaled(scaler()).double(), DataLoader(batches, batch_size=None))
            found[kind] = f"trained {trainer.global_step} steps"
        except PlanError as error:
            found[kind] = str(error)
    return found


def everything(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    """By what the run does also: norms that are asked for or taken by hand, running scales; and what a policy does."""
    found: dict[Any, Any] = {"chosen": chosen(rank, ranks, folder)}
    for also in ALSO:
        for asks in (True, False):
            batches = list(loader_of(rank, ranks))
            found[asks, also] = told(rank, ranks, "S2", ByHand(asks), batches, also, folder)
        for kind in SCALERS:
            found[kind, also] = scaled(rank, ranks, kind, also, folder)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("pair")
    return run_ranks(everything, 2, folder, folder)


@pytest.mark.full
def test_a_norm_taken_by_hand_is_told_and_the_strategy_s_is_not(pair: list[dict[Any, Any]]) -> None:
    for also in ALSO:
        assert not pair[0][True, also]
        (text,) = pair[0][False, also]
        assert "after step 5, " in text
        assert "'encoder.1.bias' by 2.9e-02, on ranks [1]" in text, "the largest difference comes first"


@pytest.mark.filterwarnings("ignore")
def test_a_running_scale_of_the_rank_s_own_cells_is_told_and_one_of_all_cells_is_exact(
    pair: list[dict[Any, Any]], tmp_path: Path
) -> None:
    first, second = pair
    for also in ALSO:
        alone = {kind: scaled(0, 1, kind, also, tmp_path) for kind in SCALERS}
        assert not alone["own"][0]
        assert not first["shared", also][0]
        assert not second["own", also][0], "rank 0 says it"
        # Adam makes something of the bias in front of batch normalisation, whose gradient is rounding
        assert distance(first["shared", also][1], alone["shared"][1]) < 1e-8
        assert distance(first["own", also][1], alone["own"][1]) > 1e-3
        assert any("after step 6, buffers differ" in text for text in first["own", also][0])
        for text in first["own", also][0]:
            assert "'encoder.0.mean'" in text
            assert "'encoder.0.scale'" in text
            assert "encoder.2." not in text, "shared statistics are not told"


def distance(found: dict[str, Tensor], one: dict[str, Tensor]) -> float:
    return max(float((found[name].double() - value.double()).norm()) for name, value in one.items())


@pytest.mark.filterwarnings("ignore")
def test_a_policy_that_chooses_refuses_a_running_scale_of_the_rank_s_own_cells(
    pair: list[dict[Any, Any]], tmp_path: Path
) -> None:
    assert set(chosen(0, 1, tmp_path).values()) == {"trained 3 steps"}
    for found in (rank["chosen"] for rank in pair):
        assert found["shared"] == "trained 3 steps"
        for kind in ("own", "late"):
            assert found[kind].startswith("after the first step, buffers differ between ranks")
            assert "'encoder.0.mean'" in found[kind]
            assert "With strategies='S1' by name the run goes on" in found[kind]
