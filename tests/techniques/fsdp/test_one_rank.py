"""Claim: one rank whose parameters are on the host trains as without, in the bytes of its plan, from either file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_amp
from lightning_amp import AMPStrategy, StratumMemoryMonitor
from lightning_amp.errors import PlanError
from lightning_amp.lightning.strategy import hardware
from lightning_amp.lightning.strategy import strategy as strategy_module
from lightning_amp.lightning.strategy.hardware import all_but_parameters_to, has_room
from lightning_amp.quantities import format_bytes

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(self.up(x).relu(), 0.1, self.training))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, index: int) -> Any:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


BATCHES = DataLoader(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]


def fitted(strategy: Any, steps: int, **options: Any) -> tuple[Trainer, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module, callbacks = Module(), options.pop("callbacks", [])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=9,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        gradient_clip_val=0.1,
    )
    trainer.fit(module, BATCHES, **options)
    return trainer, {name: value.clone() for name, value in module.state_dict().items()}


def on_host() -> AMPStrategy:
    return AMPStrategy(strategies="fsdp", fsdp_offload=True)


def test_it_trains_as_without_and_goes_on_from_either_file(tmp_path: Path) -> None:
    _, expected = fitted("auto", 9)
    monitor = StratumMemoryMonitor(dirpath=str(tmp_path), every_n_steps=1)
    trainer, found = fitted(on_host(), 9, callbacks=[monitor])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    strategy: Any = trainer.strategy
    measured = monitor.measured_step
    assert measured is not None
    # on a CPU everything is counted as the device's
    assert strategy.plan.predicted_peak_bytes == measured.peak_bytes
    assert strategy.plan.rules[-1].spec.host_bytes > 3 * sum(value.nbytes for value in expected.values())
    of_plain, of_host = tmp_path / "plain.ckpt", tmp_path / "host.ckpt"
    fitted("auto", 6)[0].save_checkpoint(of_plain)
    fitted(on_host(), 6)[0].save_checkpoint(of_host)
    _, whole = fitted("auto", 9, ckpt_path=of_plain)
    for strategy, path in (("auto", of_host), (on_host(), of_plain), (on_host(), of_host)):
        _, found = fitted(strategy, 9, ckpt_path=path)
        assert all(torch.equal(found[name], value) for name, value in whole.items()), (strategy, path)


def test_a_host_without_room_ends_the_fit_before_anything_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_bytes", lambda node_ranks: 0)
    with pytest.raises(
        PlanError, match="takes .* of host memory, and a rank may take 0 B of what is free there; leave"
    ):
        fitted(on_host(), 1)


def test_the_policy_keeps_on_the_host_what_gpus_have_no_room_for() -> None:
    def made(**bounds: Any) -> Any:
        return lightning_amp.plan(Wide(), torch.zeros(4, 512), rates="H100", **bounds).plan

    class Wide(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.blocks = nn.ModuleList(nn.Linear(8192, 8192) if k else nn.Linear(512, 8192) for k in range(9))

        def training_step(self, batch: Any, index: int) -> Any:
            for block in self.blocks:
                batch = block(batch)
            return batch.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    whole = made()
    # 2 GiB of parameters, and three times as much of gradients and state
    assert whole.strategies == ()
    found = made(device_memory="2300MiB")
    assert (found.fits, found.strategies) == (True, ("fsdp",)), found
    assert found.rules[-1].spec.offload
    assert f"each rank takes {format_bytes(found.rules[-1].spec.host_bytes)} of host memory" in found.notes
    # the host has no room either
    assert made(device_memory="2300MiB", host_memory="4GiB").fits is False
    # half of it fits on neither of two, where all that fits is faster on the device
    assert not made(device_memory="7GiB", devices=2).rules[-1].spec.offload
    shared = made(device_memory="2300MiB", devices=2)
    assert (shared.fits, shared.strategies) == (True, ("S1", "fsdp")), shared
    assert shared.rules[-1].spec.offload
    assert 2 * shared.rules[-1].spec.host_bytes == found.rules[-1].spec.host_bytes
    assert made(device_memory="2300MiB", devices=2, host_memory="2GiB").fits is False
    with pytest.raises(PlanError, match="host_memory='4GiB' requires a module and a batch"):
        lightning_amp.plan(lightning_amp.profile(Module(), torch.zeros(4, WIDTH)), host_memory="4GiB")


def test_a_module_for_which_the_device_has_no_room_is_split_on_the_host(monkeypatch: Any) -> None:
    _, expected = fitted("auto", 3)
    moved = list[str]()
    move, here = AMPStrategy.model_to_device, strategy_module.all_but_parameters_to

    def whole(self: AMPStrategy) -> None:
        moved.append("module")
        move(self)

    def without(device: torch.device, module: nn.Module) -> None:
        moved.append("all but parameters")
        here(device, module)

    monkeypatch.setattr(AMPStrategy, "model_to_device", whole)
    monkeypatch.setattr(strategy_module, "all_but_parameters_to", without)
    for room, strategy, then in ((True, on_host(), "module"), (False, on_host(), "all but parameters")):
        monkeypatch.setattr(strategy_module, "has_room", lambda *_, room=room: room)
        _, found = fitted(strategy, 3)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert moved.pop() == then
        assert not moved
    # where another plan fits, the module goes to the device after it
    fitted(AMPStrategy(strategies="recompute"), 3)
    assert moved == ["module"]


def test_buffers_and_metrics_go_to_the_device_and_parameters_stay() -> None:
    module = Module()
    module.register_buffer("scale", torch.ones(2))
    module.bias, module.seen = nn.Parameter(torch.ones(())), MeanMetric()
    all_but_parameters_to(torch.device("meta"), module)
    there = {name for name, value in module.state_dict(keep_vars=True).items() if value.is_meta}
    assert there == {"scale", "bias"}
    assert module.seen.mean_value.is_meta
    assert module.device.type == "meta"
    assert has_room(torch.device("cpu"), module)
