"""Claim: `blocks=` names submodules by class, name or pattern that techniques then work on, wherever they are; the
plan's peak is measured, training is as before, and what cannot be a block is refused in one message.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.errors import PlanError
from lightning_amp.footprint.find_blocks import blocks_with_own_parameters, find_blocks, named_blocks
from lightning_amp.techniques.pipeline.run.blocks import blocks_for_stages
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised

WIDTH, ROWS = 16, 512


class Res(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attributes(Optimised, by=torch.optim.Adam):
    """Parts are attributes; one part is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.unused = nn.Linear(4, WIDTH), Res()
        self.down1, self.down2, self.up1, self.up2 = Res(), Res(), Res(), Res()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one = self.down1(self.enter(batch))
        return (self.up2(self.up1(self.down2(one))) + one).square().mean()


def _fit(strategy: Any) -> tuple[Attributes, Meter, Any]:
    torch.manual_seed(0)
    module, data, meter = Attributes().double(), torch.randn(3 * ROWS, 4, dtype=torch.float64), Meter()
    trainer = trainer_of(strategy, precision="64-true", callbacks=[meter])
    trainer.fit(module, DataLoader(data, ROWS))
    return module, meter, getattr(trainer.strategy, "plan", None)


@pytest.mark.long
def test_named_parts_are_computed_again_and_train_as_before() -> None:
    plain, full, _ = _fit("auto")
    names = ["down1", "down2", "up1", "up2"]
    for technique in ("recompute", "chunk"):
        module, meter, plan = _fit(AMPStrategy(strategies=technique, blocks=["down?", "up*"], device_memory="2400KiB"))
        found = {rule.fqn for rule in plan.rules if rule.strategy == technique}
        assert found
        assert found <= {*names}
        assert plan.predicted_peak_bytes == meter.live.peak < 0.6 * full.live.peak
        for one, other in zip(plain.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    # nothing stays on the module
    assert [*find_blocks(module)] == [f"{name}.inner.{i}" for name in ("unused", *names) for i in range(3)]


def test_classes_names_and_patterns_are_blocks_everywhere() -> None:
    module = Attributes()
    path = f"{Res.__module__}.Res"
    for blocks in ([Res], [path], ["*"], ["unused*", "*1", "*2"]):
        with named_blocks(module, blocks):
            assert {"unused", "down1", "down2", "up1", "up2"} <= {*find_blocks(module)}
            assert [*blocks_with_own_parameters(module)] == [*find_blocks(module)]
            assert "down1.inner" not in find_blocks(module)
    planned = lightning_amp.plan(module, f"{ROWS}x4", strategies="recompute", blocks=["down1", "up*"])
    assert [rule.fqn for rule in planned.plan.rules if rule.fqn] == ["down1", "up1", "up2"]


def test_a_list_whose_layers_are_not_named_is_no_pipeline() -> None:
    module = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 4)})
    for blocks, reason in ((["head"], "blocks= names other modules than those of 'layers'"), (["layers.*"], "")):
        with named_blocks(module, blocks):
            names, why = blocks_for_stages(module)
        assert names == (() if reason else ("layers.0", "layers.1"))
        assert why.startswith(reason)


def test_what_cannot_be_a_block_is_refused() -> None:
    module = Attributes()
    cases = {
        ("left*",): "blocks=['left*'] was given, and 'left*' matches no submodule",
        (nn.Conv2d,): "matches no submodule",
        ("no.such.Class",): "matches no submodule",
        ("down1", "down1.inner"): "'down1.inner' matches only what lies in other blocks (down1)",
        (Res,): "'unused' is never called with gradients by the step",
        ("down1", "down1.inner.0", "enter"): "lies in other blocks",
        (3,): "blocks=[3] was given; allowed is a list of classes",
        (): "blocks=[] was given; allowed is a list of classes",
    }
    for blocks, text in cases.items():
        with pytest.raises(PlanError, match=re.escape(text)):
            lightning_amp.plan(module, f"{ROWS}x4", strategies="recompute", blocks=list(blocks))
    with pytest.raises(PlanError, match=re.escape("blocks='down1' was given; allowed is a list of classes")):
        AMPStrategy(blocks="down1")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="'unused' is never called"):
        _fit(AMPStrategy(strategies="recompute", blocks=[Res]))


class Keyed(Attributes):
    """Layers in a dictionary, as a ModuleDict of a model's parts has them too."""

    def __init__(self) -> None:
        super().__init__()
        del self.down1, self.down2, self.up1, self.up2, self.unused
        parts = {"enter": nn.Linear(4, WIDTH), "head": nn.Linear(4, 4), "layers": nn.ModuleList([Res(), Res()])}
        self.layers = nn.ModuleDict({f"layer{i}": Res() for i in range(4)})
        self.parts = nn.ModuleDict(parts)
        self.pairs = nn.ModuleList(nn.ModuleDict({"one": Res(), "two": nn.Linear(4, 4)}) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.enter(batch)
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


def test_repeated_layers_of_a_dictionary_are_blocks_and_a_models_parts_are_not() -> None:
    names = [*(f"layers.layer{i}" for i in range(4)), *(f"parts.layers.{i}" for i in range(2))]
    names += [f"pairs.{i}.{name}" for i in range(2) for name in ("one", "two")]
    assert list(find_blocks(Keyed())) == names
    plan = lightning_amp.plan(Keyed(), torch.zeros(ROWS, 4), strategies="recompute")
    assert [rule.fqn for rule in plan.plan.rules if rule.fqn] == names[:4]
