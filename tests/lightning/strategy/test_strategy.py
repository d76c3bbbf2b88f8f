"""Claim: `AMPStrategy` on two ranks trains as one process does on the union of the ranks' cells, and as DDPStrategy."""

import logging
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.errors import AmpError, PlanError
from lightning_amp.lightning.strategy import plan_run as planner
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.data.batch_norm import is_shared
from tests.lightning.strategy.strategy_cases import (
    AGAINST_DDP,
    AGAINST_UNION,
    EVEN,
    UNEVEN,
    Case,
    Normalised,
    Regression,
    RunningRanks,
    trainer_of,
)
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.sharded_cases import make_plan

pytestmark = pytest.mark.ranks


def s1(**options: Any) -> AMPStrategy:
    return AMPStrategy(strategies="S1", **options)


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    """Of this rank among those that run, or plain."""
    ranks = {} if strategy == "auto" else {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
    defaults = {"max_epochs": 2, "max_steps": -1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    return trainer_of(strategy, **ranks, **defaults | options)


def loader(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def train(case: Case, strategy: Any, rank: int | None) -> dict[str, Any]:
    module = case.module()
    make_trainer(strategy, **case.trainer).fit(module, loader(case.batches(rank)))
    return {"state": module.state_dict(), "norms": module.norms}


class Watch(Callback):
    """What the module looks like while it trains."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.shared = 0
        self.counts: list[dict[str, int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.keys = list(pl_module.state_dict())
        self.shared = sum(is_shared(m) for m in pl_module.modules())

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # between the forward pass and the optimiser: nothing of Lightning's own communicates there
        self.mode = CountCollectives()
        self.mode.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.counts.append(dict(self.mode.counts))


def life_cycle(rank: int) -> dict[str, Any]:
    """Two fits and a validation with one Trainer."""
    module = Normalised()
    keys, norm = list(module.state_dict()), module.body[1]
    strategy, watch = s1(balance_cells=True), Watch()
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[watch])
    data = Case(Normalised, cells=EVEN[:2]).batches(rank)
    before = strategy.plan
    trainer.fit(module, loader(data))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(data))
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    return {
        "no plan before": before is None,
        "keys": watch.keys == keys,
        "shared": watch.shared == 1,
        "restored": module.body[1] is norm and module.body[4] is norm and type(norm) is nn.BatchNorm1d,
        "no hooks left": sum(hooks) == 0,
        "trained": int(norm.num_batches_tracked) == 2 * 2 * 2,
        "balance": strategy.balance_cells,
        "sampler": strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank},
        "data ranks": strategy.data_parallel_size == 2,
        "one mesh": strategy.mesh is strategy.mesh and strategy.mesh.mesh_dim_names == ("data", "model"),
        "is_distributed": strategy.is_distributed,
        "counts": watch.counts,
    }


class Validated(Normalised):
    """Reports buffers before and in validation, draws a number, and logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn = torch.rand(()).item()
        self.log("constant", 1.0, batch_size=len(batch["rna"]["x"]), sync_dist=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        # the strategy's own hook comes after the module's
        self.local_mean = self.body[1].running_mean.clone()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_mean = self.body[1].running_mean.clone()


def local_statistics(rank: int, **options: Any) -> dict[str, Any]:
    module, watch = Validated(), Watch()
    torch.manual_seed(100 + rank)
    own = torch.rand(()).item()
    strategy = s1(share_batch_statistics=False)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[watch], **options)
    data = Case(Validated, cells=UNEVEN[:3]).batches(rank)
    trainer.fit(module, loader(data), loader(data))
    return {
        "shared": watch.shared,
        "drawn": module.drawn,
        "drawn before": own,
        "before validation": module.local_mean,
        "in validation": module.shared_mean,
        "logged": trainer.callback_metrics["constant_epoch"].item(),
        "rules": [type(rule.spec).__name__ for rule in strategy.plan.rules],
    }


def refused(rank: int, strategy: AMPStrategy, module: LightningModule) -> tuple[str, str]:
    try:
        make_trainer(strategy).fit(module, loader(Case(Regression).batches(rank)))
    except AmpError as error:
        return type(error).__name__, str(error)
    return "", ""


def cannot_plan(facts: Any, given: Any) -> Any:
    assert facts.strategy.global_rank == 0, "only rank 0 plans"
    raise PlanError("no plan for you")


class PerRank(Regression):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2 + rank)


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.LazyLinear(2)


def reductions(rank: int) -> dict[str, Any]:
    strategy = AMPStrategy()
    strategy.accelerator = None
    strategy.cluster_environment = RunningRanks(rank, 2)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    integers = torch.tensor([3 + rank, 10])
    values = {
        "mean of integers": strategy.reduce(integers.clone(), reduce_op="mean").tolist(),
        "sum of integers": strategy.reduce(integers.clone(), reduce_op="sum").tolist(),
        "mean": strategy.reduce(torch.tensor(1.0 + rank)).item(),
        "max": strategy.reduce(torch.tensor(1.0 + rank), reduce_op="max").item(),
        "operation": strategy.reduce(torch.tensor(1 + rank), reduce_op=dist.ReduceOp.SUM).item(),
        "no tensor": strategy.reduce("text"),
    }
    strategy.request = Request(model_parallel_size=2)
    values["sum over a model group"] = strategy.reduce(torch.tensor(4), reduce_op="sum").item()
    values["sampler of a model group"] = strategy.distributed_sampler_kwargs
    strategy.request = Request(model_parallel_size=3)
    with pytest.raises(PlanError) as caught:
        _ = strategy.mesh
    values["no mesh"] = str(caught.value)
    return values


def unknown_cells(rank: int) -> list[str]:
    class Ambiguous(Regression):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "edges": torch.zeros(2, 9)}

    case = Case(Ambiguous, cells=EVEN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case_result = train(case, s1(), rank)
        raw = train(AGAINST_UNION["raw_backward"], s1(), rank)
    assert case_result["norms"], "trained"
    assert raw["state"], "trained"
    return [str(w.message) for w in caught]


def all_cases(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seen: dict[str, Any] = {}
    for name, case in AGAINST_UNION.items():
        seen[name] = train(case, s1(bucket_mb=1e-4), rank)
        if rank == 0:
            seen["union of " + name] = train(case, "auto", None)
    for name, case in AGAINST_DDP.items():
        seen["amp " + name] = train(case, s1(), rank)
        seen["ddp " + name] = train(case, DDPStrategy(find_unused_parameters=True), rank)
    seen["life"] = life_cycle(rank)
    seen["local"] = local_statistics(rank)
    seen["flag"] = local_statistics(rank, sync_batchnorm=True)
    seen["refused"] = {
        "ranks": refused(rank, AMPStrategy(plan=make_plan((), 3)), Regression()),
        "differs": refused(rank, s1(), PerRank(rank)),
        "lazy": refused(rank, s1(), Lazy()),
        "file": refused(rank, AMPStrategy(plan="/nowhere/plan.json"), Regression()),
    }
    with patch.object(planner, "_plan_of_module", cannot_plan):
        seen["refused"]["plan"] = refused(rank, AMPStrategy(), Regression())
    seen["reductions"] = reductions(rank)
    seen["warnings"] = unknown_cells(rank)
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_cases, 2, tmp_path_factory.mktemp("strategy"), timeout=200)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other), "the same state"
    return max(((one[k] - other[k]).double().norm() / (1 + other[k].double().norm())).item() for k in one)


@pytest.mark.parametrize("name", AGAINST_UNION)
def test_two_ranks_train_as_one_process_on_the_union(ranks: list[Any], name: str) -> None:
    union = ranks[0]["union of " + name]
    start = AGAINST_UNION[name].module().state_dict()
    assert distance(start, union["state"]) > 1e-3, "training must move the parameters"
    for rank in ranks:
        assert distance(rank[name]["state"], union["state"]) < 1e-12
    first, second = (rank[name]["state"] for rank in ranks)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["automatic", "clipped_by_norm", "unfrozen", "one_rank_only"])
def test_hooks_after_backward_see_averaged_gradients(ranks: list[Any], name: str) -> None:
    union = ranks[0]["union of " + name]["norms"]
    for rank in ranks:
        assert rank[name]["norms"] == pytest.approx(union, rel=1e-12)


@pytest.mark.parametrize("name", AGAINST_DDP)
def test_equal_batches_train_as_with_ddp_bit_for_bit(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        amp, ddp = rank["amp " + name]["state"], rank["ddp " + name]["state"]
        assert all(torch.equal(amp[key], ddp[key]) for key in amp)


def test_life_cycle(ranks: list[Any]) -> None:
    for rank in ranks:
        counts = rank["life"].pop("counts")
        assert not [claim for claim, holds in rank["life"].items() if not holds]
        # from zero_grad to the step: two batch statistics in backward, changed parameters, one bucket
        assert counts == [{"allreduce_": 4}] * 4


def test_local_statistics_stay_local_until_validation_takes_rank_0s(ranks: list[Any]) -> None:
    first, second = local = [rank["local"] for rank in ranks]
    assert [r["shared"] for r in local] == [0, 0]
    assert [rank["flag"]["shared"] for rank in ranks] == [1, 1], "sync_batchnorm of the Trainer shares them"
    assert not torch.equal(first["before validation"], second["before validation"])
    for rank in local:
        assert torch.equal(rank["in validation"], first["before validation"])
        assert rank["logged"] == 1.0, "a constant stays that constant"
    assert first["rules"] == ["DataParallel"]
    # unseeded ranks draw the same
    assert first["drawn before"] != second["drawn before"]
    assert first["drawn"] == second["drawn"]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("plan", "PlanError", "no plan for you"),
        ("ranks", "PlanError", "a plan for 1 x 3 ranks (data x model) is not supported, the run has 2 ranks"),
        ("differs", "InstallError", "the model must be the same on every rank"),
        ("lazy", "InstallError", "['spare.weight', 'spare.bias'] have none yet"),
        ("file", "PlanError", "/nowhere/plan.json"),
    ],
)
def test_every_rank_is_told_what_is_wrong(ranks: list[Any], case: str, kind: str, text: str) -> None:
    for rank in ranks:
        assert rank["refused"][case][0] == kind
        assert text in rank["refused"][case][1]


def test_reduce_does_not_round_and_counts_a_model_group_once(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["reductions"] == {
            "mean of integers": [3.5, 10.0],
            "sum of integers": [7, 20],
            "mean": 1.5,
            "max": 2.0,
            "operation": 3,
            "no tensor": "text",
            "sum over a model group": 4,
            "sampler of a model group": {"num_replicas": 1, "rank": 0},
            "no mesh": (
                "model_parallel_size=3 is not supported, the run has 2 ranks; it must divide them. Change"
                " `devices` or `num_nodes` of the Trainer, or model_parallel_size"
            ),
        }, number


def test_rank_0_warns_once_of_uncounted_cells_and_of_raw_backward(ranks: list[Any]) -> None:
    for text in ("number of samples in the batch cannot be read", "call self.manual_backward(loss)"):
        assert [sum(text in w for w in rank["warnings"]) >= 1 for rank in ranks] == [True, False]
    assert sum("cannot be read" in w for w in ranks[0]["warnings"]) == 1
