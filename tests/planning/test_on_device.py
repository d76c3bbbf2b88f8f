"""Claim: whoever asks, memory, time and settings of a plan are those of one device: the one whose rates are taken."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_amp.costs.device_rates import CPU_CORE, Rates, rates_for
from lightning_amp.costs.model_shape import ModelShape, reference_shape
from lightning_amp.planning import sizes
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.policies.recommend_devices import recommend_devices
from lightning_amp.planning.sizes import RankSizes
from lightning_amp.planning.time.step_seconds import on_device
from lightning_amp.techniques.hic.rows import StreamStrata
from tests.planning.profiles import hic, profile, rna

DATA = profile(hic(anchors=600, strata=4), rna())
DEVICES = {"cpu": CPU_CORE, "H100": rates_for("H100")}


def shape(cells: int = 32) -> ModelShape:
    return reference_shape(DATA, batch_size=cells)


def recommended(rates: Rates) -> Any:
    return recommend_devices(DATA, shape, cells=32, budget=None, rates=rates).scales[0].best


def planned(rates: Rates) -> Any:
    return plan(DATA, batch_size=32, rates=rates).candidates[0]


ASKED: dict[str, Callable[[Rates], Any]] = {
    "plan": planned,
    "plan of a shape that was on the other device": lambda rates: plan(
        DATA, batch_size=32, rates=rates, shape=on_device(shape(), next(r for r in DEVICES.values() if r != rates))
    ).candidates[0],
    "policy paper": lambda rates: plan(DATA, batch_size=32, devices=4, policy="paper", rates=rates),
    "named strategies": lambda rates: plan(
        DATA, batch_size=32, devices=4, strategies="S1,strata,fused,sparse,stream", rates=rates
    ),
    "recommend_devices": recommended,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ASKED)
def test_every_count_is_of_the_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()

    def launched(sizes: RankSizes) -> bool:
        seen.add(sizes.decoder.launched)
        return sizes.decoder.launched

    monkeypatch.setattr(RankSizes, "launched", property(launched))
    # what was counted for others is remembered
    sizes.same_strata.cache_clear()
    ASKED[name](DEVICES[device])
    assert seen == {device != "cpu"}


def test_settings_follow_the_device() -> None:
    def cells(rates: Rates) -> list[int]:
        made = plan(DATA, batch_size=512, strategies="S1,stream", rates=rates)
        return [rule.spec.cells for rule in made.rules if isinstance(rule.spec, StreamStrata)]

    (few,), (many,) = (cells(rates) for rates in DEVICES.values())
    assert few < many
