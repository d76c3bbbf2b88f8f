"""Claim: a module whose samples are split over ranks trains, validates and predicts as one process does, with what a
Trainer does around a step; its peak is predicted; what is not supported is refused before anything is trained."""

import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import InstallError, PlanError, ShardError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.sequence.row import SequenceParallel
from lightning_amp.techniques.table import in_order
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.ranks import run_ranks
from tests.techniques.sequence.cases import CASES, RANDOM, TWO_DIMS, WIDE, Case, Noisy, Normed, Picture, Text


def run(
    case: Case, rank: int, ranks: int, *, rows: slice = slice(None), gradients: bool = False, **options: Any
) -> dict[str, Any]:
    """Three steps with a validation, then a prediction; of one rank without the strategy.

    With `gradients` they are kept, which takes memory that no plan knows of.
    """
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    batches = [case.batch() for _ in range(3)]
    if rows != slice(None):
        batches = [batch[rows] for batch in batches]
    loader, meter = DataLoader(batches, batch_size=None), Meter()  # type: ignore[arg-type]
    own = {"strategies": "sequence", "model_parallel_size": ranks, **case.options, **options}
    trainer = trainer_of(
        AMPStrategy(**own) if ranks > 1 else "auto", rank=rank, ranks=ranks, callbacks=[meter],
        num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    module = case.module().double()
    module.gradients = [] if gradients else None
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    plan = getattr(trainer.strategy, "plan", None)
    found = trainer.predict(module, loader)
    assert not [name for name in vars(module) if name.endswith("_step")], "the module is as it was"
    return {
        "losses": [float(loss) for loss in module.losses],
        "gradients": module.gradients,
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": metrics,
        "predicted": found,
        "plan": plan,
        "peak": meter.live.peak,
    }


def close(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(right["losses"], rel=1e-12)
    same_training(found, right)
    assert found["metrics"] == pytest.approx(right["metrics"], rel=1e-12)
    torch.testing.assert_close(found["predicted"], right["predicted"], rtol=1e-10, atol=1e-12)


def same_training(found: dict[str, Any], right: dict[str, Any]) -> None:
    """All gradients of all steps where they were kept, then parameters and buffers."""
    torch.testing.assert_close(found["gradients"], right["gradients"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["state"], right["state"], rtol=1e-10, atol=1e-12)


def all_cases(rank: int, ranks: int, names: list[str]) -> dict[str, Any]:
    found = {name: run(CASES[name], rank, ranks) for name in names}
    return {name: {**one, "plan": one["plan"].to_json()} for name, one in found.items()}


@pytest.mark.ranks
def test_modules_train_as_one_process_does(tmp_path: Path) -> None:
    """Losses, metrics, parameters, buffers and predictions; with the predicted peak."""
    found = run_ranks(all_cases, 2, tmp_path, [*CASES])
    three = run_ranks(all_cases, 3, tmp_path, RANDOM)
    for name, case in CASES.items():
        # random numbers are others than those of one process, and the same on any number of ranks
        right = three[0][name] if name in RANDOM else run(case, 0, 1)
        for rank in found:
            close(rank[name], right)
        plan = Plan.from_json(found[0][name]["plan"])
        assert plan.strategies == in_order(("S1", *case.options.get("strategies", "sequence").split(","))), name
        assert plan.mesh.model == 2
        assert found[0][name]["peak"] == pytest.approx(plan.predicted_peak_bytes, rel=0.05), name


def on_a_grid(rank: int, ranks: int) -> dict[str, Any]:
    return {**run(TWO_DIMS, rank, ranks), "plan": None}


class Plain(Noisy):
    """Without random numbers, whose order depends on how samples are dealt."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - batch.cumsum(1)).square().mean()


NET = Case(Plain, CASES["noise"].batch, CASES["noise"].options)
NORMED = Case(Normed, lambda: torch.randn(4, 2, 12, 8).double(), {"sequence_dim": {"batch": 2}})
OVER_DATA: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (NET, {}),
    "fsdp": (NET, {"strategies": "sequence,fsdp"}),
    "fsdp in groups": (NET, {"strategies": "sequence,fsdp", "fsdp_ranks": 2}),
    "batch norm, fsdp": (NORMED, {"strategies": "sequence,recompute,fsdp"}),
}
SAMPLES = (3, 1)


def over_data_too(rank: int, ranks: int) -> dict[str, Any]:
    """Two ranks of the data axis have unequal numbers of samples."""
    own = slice(SAMPLES[0]) if rank < 2 else slice(SAMPLES[0], None)
    found = {
        name: run(case, rank, ranks, rows=own, gradients=True, model_parallel_size=2, **options)
        for name, (case, options) in OVER_DATA.items()
    }
    # of equal samples on all data ranks
    found["wide"] = run(WIDE, rank, ranks, model_parallel_size=2)
    return {name: {**one, "plan": one["plan"].to_json()} for name, one in found.items()}


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
def test_two_dims_and_a_data_axis(tmp_path: Path) -> None:
    right = run(TWO_DIMS, 0, 1)
    for found in run_ranks(on_a_grid, 4, tmp_path):
        close(found, right)
    ranks = run_ranks(over_data_too, 4, tmp_path)
    for name, (case, _) in OVER_DATA.items():
        right = run(case, 0, 1, gradients=True)
        for found in ranks:
            same_training(found[name], right)
        losses = torch.tensor([ranks[0][name]["losses"], ranks[2][name]["losses"]], dtype=torch.float64)
        mean = (losses * torch.tensor(SAMPLES)[:, None]).sum(0) / sum(SAMPLES)
        torch.testing.assert_close(mean, torch.tensor(right["losses"], dtype=torch.float64), rtol=1e-10, atol=0)
    right = run(WIDE, 0, 1)
    for found in ranks:
        close(found["wide"], right)
    plan = Plan.from_json(ranks[0]["wide"]["plan"])
    assert (plan.mesh, plan.gradient_ranks) == (MeshShape(data=2, model=2), 4)
    assert ranks[0]["wide"]["peak"] == pytest.approx(plan.predicted_peak_bytes, rel=0.05)


class Recurrent(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(3, 3, batch_first=True)  # type: ignore[assignment]

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)[0]


class Clipped(Noisy):
    """By a hook that is no linear function of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


class PerPosition(Noisy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean((0, 2))


REFUSED: dict[str, tuple[Callable[[], Case], dict[str, Any], type[Exception], str]] = {
    "no dims": (lambda: CASES["noise"], {"sequence_dim": None}, PlanError, "allowed are 'auto'"),
    "no tensor": (lambda: CASES["noise"], {"sequence_dim": {"x": 1}}, ShardError, "has no tensor at 'x'; it"),
    "no dim": (lambda: CASES["noise"], {"sequence_dim": {"batch": 3}}, ShardError, "dim 3 of 'batch'"),
    "sizes": (lambda: CASES["noise"], {"sequence_sizes": [4, 4]}, ShardError, "one size per rank"),
    "grid": (lambda: CASES["noise"], {"sequence_grid": "2x1"}, PlanError, "one dim requires none"),
    "chunk": (lambda: CASES["text"], {"strategies": "sequence,chunk"}, PlanError,
        "chunk and sequence cannot be together: .* a rank holds less with recompute and fsdp and offload, and"),
    "pipeline": (lambda: CASES["text"], {"strategies": "sequence,pipeline"}, PlanError, "pipeline"),
    "an operator": (lambda: Case(Recurrent, CASES["noise"].batch, CASES["noise"].options), {}, ShardError,
        "lstm' in 'Recurrent', .*test_sequence.py"),
    "a hook of a parameter": (lambda: Case(Clipped, CASES["noise"].batch, CASES["noise"].options), {}, InstallError,
        "'net.0.weight' has hooks"),
    "a loss that is no number": (lambda: Case(PerPosition, CASES["noise"].batch, CASES["noise"].options), {},
        ShardError, "a loss is a number"),
}  # fmt: skip


def refused(rank: int, ranks: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (make, options, _, _) in REFUSED.items():
        try:
            run(make(), rank, ranks, **options)
            found[name] = "", ""
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return found


@pytest.mark.ranks
def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, tmp_path):
        for name, (_, _, kind, words) in REFUSED.items():
            assert found[name][0] == kind.__name__, (name, found[name])
            assert re.search(words, found[name][1]), (name, found[name])


def test_a_rank_holds_its_part_of_what_one_device_holds() -> None:
    """Of ranks that do not exist; nothing that is made to find shapes is counted."""
    batch, found = torch.randn(1, 2, 64, 64), {}
    for ranks in (1, 4, 16):
        steps = DrySteps("sequence", SequenceParallel(dims="batch:2"), ranks) if ranks > 1 else None
        step = StepOfModule(Picture(), lambda: batch, run_settings=BY_ITSELF, steps=steps)
        timeline = step.profiled(CPU_CORE).profile.timeline
        found[ranks] = max(moment.by_kind["activations"] for moment in timeline) - batch.nbytes
    assert found[4] * 4 < 1.15 * found[1]
    # of four rows a rank has two more from its neighbours
    assert found[16] * 16 < 1.6 * found[1]


class Wide(Noisy):
    """Without a list of blocks that could be computed again, in chunks or in stages."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.one, self.two = nn.Identity(), nn.Linear(3, 32), nn.Linear(32, 3)  # type: ignore[assignment]

    def forward(self, batch: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(batch).exp().sin()))

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - batch.roll(1, 1)).square().mean()


LONG = Case(Wide, lambda: torch.randn(1, 20_000, 3).double(), {})


def within(rank: int, ranks: int, budget: int) -> dict[str, Any]:
    found = run(LONG, rank, ranks, strategies=None, model_parallel_size="auto", device_memory=f"{budget}B")
    return {**found, "plan": found["plan"].to_json()}


@pytest.mark.ranks
def test_a_policy_splits_samples_where_no_plan_that_leaves_them_whole_fits(tmp_path: Path) -> None:
    right = run(LONG, 0, 1)
    for found in run_ranks(within, 2, tmp_path, int(0.7 * right["peak"])):
        close(found, right)
        plan = Plan.from_json(found["plan"])
        assert (plan.policy, plan.strategies, plan.fits) == ("auto", ("S1", "sequence"), True)
        assert any("every plan that leaves samples whole needs" in note for note in plan.notes)


class Layers(Noisy):
    """Layers that can run in chunks."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24)) for _ in range(2))
        self.net = nn.Sequential(*layers)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()


MANY = Case(Layers, lambda: torch.randn(1, 12_000, 24).double(), {})


class During(pl.Callback):
    """Most bytes alive in a step of an evaluation."""

    def __init__(self) -> None:
        self.live = LiveBytes()

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, *of: Any) -> None:
        self.live.watch([*module.parameters(), *module.buffers(), batch])
        self.live.__enter__()

    def on_predict_batch_end(self, *of: Any) -> None:
        self.live.__exit__(None, None, None)

    on_validation_batch_start, on_validation_batch_end = on_predict_batch_start, on_predict_batch_end


def evaluated(
    rank: int, ranks: int, case: Case, step: str = "predict", *, ahead: bool = True, **options: Any
) -> dict[str, Any]:
    """A run that does not train, of a loader that can be read ahead or not; of one rank without the strategy."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    meter, batches = During(), [case.batch()]
    loader: Any = DataLoader(batches, batch_size=None) if ahead else iter(batches)  # type: ignore[arg-type]
    strategy = AMPStrategy(**options) if ranks > 1 else "auto"
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, callbacks=[meter], use_distributed_sampler=False)
    module = case.module().double()
    found = getattr(trainer, step)(module, loader)
    plan = getattr(trainer.strategy, "plan", None)
    return {"found": found, "peak": meter.live.peak, "plan": plan and plan.to_json()}


def evaluations(rank: int, ranks: int, wide: int, layers: int) -> dict[str, Any]:
    # a link on which sending takes no time, and one on which it takes long
    fast, slow = (
        replace(CPU_CORE, links=replace(CPU_CORE.links, intra_bandwidth=n, latency=1e-9)) for n in (1e15, 1e3)
    )
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("fast", "slow")}
        files["fast"].write_text(fast.to_json())
        files["slow"].write_text(slow.to_json())
        return {
            "wide": evaluated(rank, ranks, LONG, device_memory=wide),
            "named": evaluated(rank, ranks, LONG, "validate", strategies="sequence", model_parallel_size=2),
            "late": evaluated(
                *(rank, ranks, LONG, "validate"),
                ahead=False,
                strategies="sequence",
                model_parallel_size=2,
                sequence_dim={"batch": 1},
                device_memory=wide,
            ),
            **{
                name: evaluated(rank, ranks, MANY, device_memory=layers, rates=str(file))
                for name, file in files.items()
            },
        }


@pytest.mark.ranks
def test_evaluations_are_split_where_that_fits_and_is_faster_than_chunks(tmp_path: Path) -> None:
    right = {
        "wide": evaluated(0, 1, LONG),
        "named": evaluated(0, 1, LONG, "validate"),
        "late": evaluated(0, 1, LONG, "validate"),
        "fast": evaluated(0, 1, MANY),
        "slow": evaluated(0, 1, MANY),
    }
    budgets = int(0.7 * right["wide"]["peak"]), int(0.9 * right["fast"]["peak"])
    for rank in run_ranks(evaluations, 2, tmp_path, *budgets):
        plans = {name: Plan.from_json(found["plan"]) for name, found in rank.items()}
        for name, found in rank.items():
            torch.testing.assert_close(found["found"], right[name]["found"], rtol=1e-10, atol=1e-12)
            if name == "late":
                assert any("the peak is not known" in note for note in plans[name].notes)
                continue
            assert plans[name].fits, name
            assert found["peak"] == pytest.approx(plans[name].predicted_peak_bytes, rel=0.05), name
        assert plans["wide"].strategies == ("S1", "sequence")
        assert plans["named"].evaluates == "validation_step"
        assert plans["slow"].strategies == ("S1", "chunk")
        for name in ("slow", "fast"):
            assert any("times as long as whole samples in chunks" in note for note in plans[name].notes)
        assert plans["fast"].strategies == ("S1", "sequence")


class Deep(Noisy):
    """Parameters take as much as what is saved of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(8)])

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - batch).square().mean()


def with_fsdp(rank: int, ranks: int) -> dict[str, Any]:
    case = Case(Deep, lambda: torch.randn(1, 240, 48).double(), {"sequence_dim": "auto"})
    named = run(case, rank, ranks, strategies="sequence,fsdp")
    budget = f"{named['plan'].predicted_peak_bytes}B"
    auto = {"strategies": None, "model_parallel_size": "auto", "device_memory": budget}
    found = run(case, rank, ranks, **auto)
    return {**found, "plan": found["plan"].to_json()}


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
def test_a_policy_splits_parameters_too_where_samples_alone_do_not_suffice(tmp_path: Path) -> None:
    for found in run_ranks(with_fsdp, 2, tmp_path):
        plan = Plan.from_json(found["plan"])
        assert (plan.strategies, plan.fits) == (("S1", "fsdp", "sequence"), True)


def test_options_are_checked_before_processes_start() -> None:
    with pytest.raises(PlanError, match="sequence_dim=.* is an option of sequence and tensor3d; add"):
        AMPStrategy(sequence_dim={"x": 1})
    assert Text().losses == []


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "64-true"},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "precision": "64-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "averaged weights": {"precision": "64-true", "averages": True},
    "by hand": {"precision": "64-true", "by_hand": True},
    "fsdp, by hand": {"precision": "64-true", "by_hand": True, "strategies": "sequence,fsdp"},
}  # fmt: skip


class ByHand(Text):
    """Two backward passes and a step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        for scale in (1.0, 0.5):
            loss = scale * self.loss(batch)
            self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        return loss.detach()


def trained(
    rank: int, ranks: int, *, ckpt: str | None = None, epochs: int = 1, save: str = "", **options: Any
) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    seed_everything(5, verbose=False)
    batches = [CASES["text"].batch() for _ in range(4)]
    if options.pop("averages", False):
        options["callbacks"] = [EMAWeightAveraging(decay=0.5)]
    strategies = options.pop("strategies", "sequence")
    module = ByHand() if options.pop("by_hand", False) else Text()
    if options["precision"] == "64-true":
        # Lightning loads a checkpoint before it converts a module
        module = module.double()
    own = {"strategies": strategies, "model_parallel_size": ranks, **CASES["text"].options}
    options |= {"max_epochs": epochs, "max_steps": -1, "use_distributed_sampler": False}
    trainer = trainer_of(AMPStrategy(**own) if ranks > 1 else "auto", rank=rank, ranks=ranks, **options)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt)  # type: ignore[arg-type]
    if save:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value in module.state_dict().items()}


def on_ranks(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(rank, ranks, **options) for name, options in OPTIONS.items()}
    found["saved"] = trained(rank, ranks, save=f"{folder}/two.ckpt", precision="64-true", strategies="sequence,fsdp")
    return found


def going_on(rank: int, ranks: int, folder: str) -> dict[str, Tensor]:
    return trained(rank, ranks, ckpt=f"{folder}/two.ckpt", epochs=2, precision="64-true", strategies="sequence,fsdp")


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
def test_what_a_trainer_does_around_a_step_is_exact(tmp_path: Path) -> None:
    found = run_ranks(on_ranks, 2, tmp_path, str(tmp_path))
    for name, options in OPTIONS.items():
        right, near = trained(0, 1, **options), 2e-2 if "bf16" in name else 1e-10
        for rank in found:
            torch.testing.assert_close(rank[name], right, rtol=near, atol=near)
    right = trained(0, 1, epochs=2, precision="64-true")
    for ranks in (1, 3):
        found = run_ranks(going_on, ranks, tmp_path, str(tmp_path))
        torch.testing.assert_close(found[-1], right, rtol=1e-10, atol=1e-12)
