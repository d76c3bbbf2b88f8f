"""Modules that train with `offload` are bit by bit those of a plain fit, at the predicted bytes of device and host."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.errors import AmpError
from lightning_amp.techniques.offload.install import moves_of
from lightning_amp.techniques.offload.moves import Moves
from tests.any_module import QUIET, Meter
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.replay.models import MODELS, Llama, Trained, difference, fit, plain
from tests.techniques.replay.test_fit import Compiled, Transformed, by_hand


class Offloaded(Meter):
    """A meter that also keeps what is on the host."""

    moves: Moves | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.moves = moves_of(module)


def run(module: Any, data: Any, strategy: Any, *, double: bool = True) -> tuple[Any, Offloaded, Any]:
    torch.manual_seed(1)
    meter = Offloaded()
    options: Any = {"accelerator": "cpu", "devices": 1, "precision": "64-true" if double else "32-true", **QUIET}
    trainer = Trainer(strategy=strategy, max_epochs=1, callbacks=[meter], **options)
    trainer.fit(module, DataLoader(data, batch_size=None))
    return module, meter, getattr(trainer.strategy, "plan", None)


def spec_of(plan: Any) -> Any:
    return next(rule.spec for rule in plan.rules if rule.strategy == "offload")


class Odd(Trained):
    """Views, writes in place, dropout, a storage saved often, strides with gaps, a checkpoint, tensors that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.register_buffer("scale", torch.ones(32))
        self.last: Tensor | None = None

    def loss(self, batch: Tensor) -> Tensor:
        h = self.narrow(batch) * self.scale
        for i in range(3):
            q, k, v = self.wide(h).chunk(3, -1)
            h = functional.dropout(q * k.sigmoid() + v.t().contiguous().t(), 0.2)
            h = functional.relu_(self.norm(h)) + h[:1].expand_as(h)
            h[:, ::2] *= 2.0
            if i == 1:
                h = checkpoint(lambda x: self.narrow(x).sin(), h, use_reentrant=False)
        self.last = h.detach()
        return (h * h + h.exp().clamp(max=3.0)).mean()


def odd_data(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, 32, generator=generator, dtype=torch.float64) for n in lengths]


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd().double()


@pytest.mark.long
@pytest.mark.release
def test_any_module_trains_within_a_budget_at_the_predicted_bytes() -> None:
    for name, share in (("points", 0.4), ("Llama", 0.8)):
        before, peak = plain(name)
        after, metered, plan = fit(name, AMPStrategy(strategies="offload", device_memory=int(share * peak)), steps=2)
        assert metered.live.peak == plan.predicted_peak_bytes <= int(share * peak), name
        assert difference(before, after) == 0.0, name
        every = spec_of(fit(name, AMPStrategy(strategies="offload"), steps=1)[2])
        assert spec_of(plan).numbers < every.numbers, name


@pytest.mark.long
def test_a_plan_is_kept_as_json_and_says_what_waits_on_the_host(tmp_path: Path) -> None:
    _, _, plan = fit("points", AMPStrategy(strategies="offload"), steps=1)
    (tmp_path / "plan.json").write_text(plan.to_json())
    again, metered, given = fit("points", AMPStrategy(plan=tmp_path / "plan.json"), steps=2)
    assert given.rules == plan.rules
    assert metered.live.peak == given.predicted_peak_bytes == plan.predicted_peak_bytes
    assert difference(plain("points")[0], again) == 0.0
    (written,) = (one["spec"] for one in json.loads(plan.to_json())["rules"] if one["strategy"] == "offload")
    assert written["host_bytes"] == written["moved_bytes"] == 32_064_000
    said = " ".join(str(plan).split())
    assert "predicted: 35 tensors wait on the host, which takes 30.6 MiB there and keeps" in said


def test_where_a_budget_is_kept_already_as_few_leave_as_help() -> None:
    peaks, moved = [], []
    for request in ({}, {"strategies": "offload"}, {"strategies": "offload", "device_memory": "1GiB"}):
        plan = lightning_amp.plan(odd(), odd_data(64)[0], **request).plan
        peaks.append(plan.predicted_peak_bytes)
        moved += [spec_of(plan).moved_bytes] if request else []
    assert peaks[0] > peaks[2] > peaks[1]
    assert 0 < moved[1] < moved[0] / 4


def test_batches_of_other_lengths_train_as_without() -> None:
    data = odd_data(128, 256, 100, 300)
    right, _, _ = run(odd(), data, "auto")
    found, metered, plan = run(odd(), data, AMPStrategy(strategies="offload"))
    assert difference(right, found) == 0.0
    # the pool has grown with the batches: its buffers are those of the largest
    assert metered.moves is not None
    assert metered.moves.pool.n_bytes > spec_of(plan).host_bytes


@pytest.mark.long
def test_several_backward_passes_of_a_step_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "odd", (by_hand(Odd), lambda n: torch.randn(64 * n, 32)))
    before, _, _ = fit("odd", "auto", steps=2)
    after, metered, plan = fit("odd", AMPStrategy(strategies="offload"), steps=2)
    assert difference(before, after) == 0.0
    assert metered.live.peak == plan.predicted_peak_bytes


@pytest.mark.long
@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.*accumulate_grad_batches")
def test_it_works_with_accumulation_and_mixed_precision() -> None:
    for options in ({"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}):
        before, whole, _ = fit("points", "auto", steps=4, **options)
        after, metered, plan = fit("points", AMPStrategy(strategies="offload"), steps=4, **options)
        assert difference(before, after) == 0.0
        assert metered.live.peak <= plan.predicted_peak_bytes < 0.6 * whole.live.peak, options


class Blocks(Trained):
    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(6))

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()


@pytest.mark.long
def test_inputs_of_recomputed_blocks_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "blocks", (Blocks, lambda n: torch.randn(4096 * n, 16)))
    peaks, states = [], []
    for names in ("S1", "recompute", "recompute,offload"):
        module, metered, plan = fit("blocks", AMPStrategy(strategies=names), steps=2)
        assert metered.live.peak == plan.predicted_peak_bytes, names
        peaks.append(metered.live.peak)
        states.append(module)
    assert peaks[0] > peaks[1] > peaks[2]
    assert difference(states[0], states[1]) == difference(states[0], states[2]) == 0.0


@pytest.mark.ranks
def test_what_a_rank_keeps_may_leave_beside_fsdp(tmp_path: Path) -> None:
    for found in run_ranks(beside_fsdp, 2, tmp_path):
        (right, whole, _, _), *others = found
        for state, peak, predicted, moved in others:
            torch.testing.assert_close(state, right, rtol=0, atol=0)
            assert peak == pytest.approx(predicted, abs=32)
            assert peak < 0.4 * whole
            # gathered parameters stay
            assert moved == others[0][3]


def beside_fsdp(rank: int, ranks: int) -> list[Any]:
    MODELS["blocks"] = (Blocks, lambda n: torch.randn(4096 * n, 16))
    found = []
    for names in ("S1", "S1,offload", "fsdp,offload"):
        options: Any = {"devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
        module, meter, plan = fit("blocks", AMPStrategy(strategies=names), steps=4, **options)
        moved = spec_of(plan).moved_bytes if "offload" in names else 0
        found.append((module.state_dict(), meter.live.peak, plan.predicted_peak_bytes, moved))
    return found


@pytest.mark.full
@pytest.mark.long
def test_an_accelerator_takes_it_by_name_with_a_window() -> None:
    torch.manual_seed(0)
    module, batch = Llama(width=64, words=50), torch.randint(0, 50, (64, 513))
    whole = lightning_amp.plan(module, batch, rates="H100").plan.predicted_peak_bytes
    # the context of a GPU alone is larger than this step
    of_tensors = replace(rates_for("H100"), memory=None)
    options: Any = {"rates": of_tensors, "device_memory": int(0.7 * whole)}
    made = lightning_amp.plan(module, batch, strategies="offload", **options).plan
    assert "offload" in made.strategies
    assert made.fits
    spec = spec_of(made)
    assert spec.window > 0
    for device, why in ((of_tensors, "have not run on a GPU yet"), ("cpu", "a CPU's memory is the host's")):
        chosen = lightning_amp.plan(module, batch, **(options | {"rates": device})).plan
        assert "offload" not in chosen.strategies
        assert chosen.diagnosis is not None
        assert why in chosen.diagnosis.does_not_help["offload"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_what_is_not_supported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "blocks", (Blocks, lambda n: torch.randn(4096 * n, 16)))
    with pytest.raises(AmpError, match="offload is not possible: it is not supported together with chunk"):
        fit("blocks", AMPStrategy(strategies="chunk,offload"), steps=1)
    for kind, why in ((Compiled, "torch.compile"), (Transformed, "torch.func")):
        monkeypatch.setitem(MODELS, "refused", (kind, MODELS["points"][1]))
        with pytest.raises(AmpError, match=why):
            fit("refused", AMPStrategy(strategies="offload"), steps=1)
    for value, why in ((True, "host_memory=True is not supported"), ("64", "has no unit"), ("x", "not a memory size")):
        for names in (None, "offload"):
            with pytest.raises(AmpError, match=why):
                AMPStrategy(strategies=names, host_memory=value)
    with pytest.raises(AmpError, match="host_memory='64GiB' is an option of fsdp and offload and"):
        AMPStrategy(strategies="recompute", host_memory="64GiB")


def test_no_more_waits_on_the_host_than_it_may_hold() -> None:
    _, metered, plan = fit("points", AMPStrategy(strategies="offload", host_memory="10MiB"), steps=2)
    spec = spec_of(plan)
    assert 9 * 2**20 < spec.host_bytes <= spec.host_memory == 10 * 2**20
    assert metered.live.peak == plan.predicted_peak_bytes


class Fewer(Trained):
    """Its first step saves more than later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        self.steps = 0

    def loss(self, batch: Tensor) -> Tensor:
        self.steps += 1
        for layer in [*self.layers][: None if self.steps == 1 else 3]:
            batch = layer(batch)
        return batch.square().mean()


def test_a_step_that_saves_less_than_the_first_is_planned() -> None:
    made = lightning_amp.plan(Fewer(), torch.randn(256, 64), strategies="offload", device_memory="1KiB").plan
    spec = spec_of(made)
    assert 0 < spec.moved_bytes <= spec.host_bytes
