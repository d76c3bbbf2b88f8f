"""Claim: without `host_memory=` a fit takes no more host memory than is free for a rank, and plans within it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.errors import PlanError
from lightning_amp.lightning.strategy import hardware
from lightning_amp.techniques.host_memory.limit import free_bytes
from lightning_amp.techniques.offload.install import moves_of
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.offload.test_fit import Blocks, spec_of
from tests.techniques.replay import models
from tests.techniques.replay.models import MODELS, difference, fit, plain

ROOM = 10 * 2**20


class Limits(Meter):
    """What a rank may have on the host, and what its node has free."""

    limit: int | None = None
    available = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        moves = moves_of(module)
        assert moves is not None
        self.limit, self.available = moves.pool.limit, psutil.virtual_memory().available


@pytest.mark.ranks
def test_ranks_of_a_node_share_its_free_memory(tmp_path: Path) -> None:
    (limit, available), (other, _) = run_ranks(limits, 2, tmp_path)
    # decided once: what each of them reads differs
    assert limit == other
    assert 0.3 * available < limit < 0.5 * available


def limits(rank: int, ranks: int) -> tuple[int | None, int]:
    MODELS["blocks"] = (Blocks, lambda n: torch.randn(256 * n, 16))
    models.Meter = Limits  # type: ignore[misc]
    options: Any = {"devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    _, meter, _ = fit("blocks", AMPStrategy(strategies="S1,offload"), steps=2, **options)
    assert isinstance(meter, Limits)
    return meter.limit, meter.available


def test_a_launcher_may_know_of_more_ranks_than_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (free_bytes(), free_bytes(2)) == (800, 400)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (free_bytes(), free_bytes(2)) == (200, 200)


def test_a_fit_plans_within_the_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make, batches = MODELS["points"]
    torch.manual_seed(0)
    ample = fit("points", AMPStrategy(strategies="offload"), steps=1)[2]
    # as of another machine
    assert ample.rules == lightning_amp.plan(make(), batches(1), strategies="offload").plan.rules
    monkeypatch.setattr(hardware, "free_bytes", lambda node_ranks: ROOM)
    found, meter, plan = fit("points", AMPStrategy(strategies="offload"), steps=2)
    spec = spec_of(plan)
    assert spec.host_memory is None
    assert 0.9 * ROOM < spec.host_bytes <= ROOM < spec_of(ample).host_bytes
    assert meter.live.peak == plan.predicted_peak_bytes
    assert difference(plain("points")[0], found) == 0.0
    # the same storages as with a bound of the user's
    named = spec_of(fit("points", AMPStrategy(strategies="offload", host_memory="10MiB"), steps=1)[2])
    assert (spec.leaves, spec.host_bytes) == (named.leaves, named.host_bytes)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert fit("points", AMPStrategy(plan=path), steps=1)[2].rules == plan.rules
    path.write_text(ample.to_json())
    with pytest.raises(
        PlanError,
        match="the given plan takes 30.6 MiB of host memory, and a rank may take 10.0 MiB of what is free there; make",
    ):
        fit("points", AMPStrategy(plan=path), steps=1)

    monkeypatch.setattr(hardware, "free_bytes", lambda node_ranks: 1000)
    with pytest.raises(PlanError, match="the host has room for 0.98 KiB, less than the first tensor takes"):
        fit("points", AMPStrategy(strategies="offload"), steps=1)


def test_what_shares_the_hosts_memory_shares_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "blocks", (Blocks, lambda n: torch.randn(4096 * n, 16)))
    options: Any = {"strategies": "fsdp,offload", "fsdp_offload": True}
    whole = 3 * 2**20

    def planned(**more: Any) -> tuple[Any, Any]:
        specs = {rule.strategy: rule.spec for rule in fit("blocks", AMPStrategy(**options, **more), steps=1)[2].rules}
        return specs["fsdp"], specs["offload"]

    rows, saved = planned(host_memory="3MiB")
    assert 0 < rows.host_bytes < whole
    assert saved.host_memory == whole - rows.host_bytes
    assert 0.8 * saved.host_memory < saved.host_bytes <= saved.host_memory
    monkeypatch.setattr(hardware, "free_bytes", lambda node_ranks: whole)
    assert planned()[1].leaves == saved.leaves


def test_a_plan_for_a_gpu_has_the_page_locked_bytes_that_torch_takes() -> None:
    torch.manual_seed(0)
    module, batch, rates = Blocks(), torch.randn(3000, 16), replace(rates_for("H100"), memory=None)

    def planned(name: str, **options: Any) -> Any:
        plan = lightning_amp.plan(module, batch, strategies=name, rates=rates, **options).plan
        return next(rule.spec for rule in plan.rules if rule.strategy == name)

    every = planned("offload")
    # of 3,000 rows of 16 or 32 floats
    assert every.host_bytes == pytest.approx(every.moved_bytes * 2**18 / 192_000, rel=0.01)
    assert every.host_bytes % 2**18 == 0
    bounded = planned("offload", host_memory="2MiB")
    assert 0 < bounded.moved_bytes < bounded.host_bytes <= 2**21
    slots = planned("host_optimizer")
    assert slots.slot_bytes == 2 ** (slots.slot_bytes.bit_length() - 1)
    state = 2 * sum(parameter.nbytes for parameter in module.parameters())
    assert slots.host_bytes - slots.slots * slots.slot_bytes == pytest.approx(state, abs=100)
