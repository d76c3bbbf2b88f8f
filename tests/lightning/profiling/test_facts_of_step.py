"""Claim: a technique is asked about a step once, and only when a draft needs its answer."""

import pytest
import torch
from torch import nn

import lightning_amp
from lightning_amp.on_demand import OnDemand, computed_in, first_of
from lightning_amp.techniques import table, technique
from tests.optimised import Optimised

SEARCHED = ("chunk", "replay", "logits", "offload")


class Blocks(Optimised, by=torch.optim.Adam):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(batch).square().mean()
        return found


def test_a_value_is_computed_once_and_the_first_mapping_is_asked_first() -> None:
    asked = list[str]()

    def compute(name: str) -> str | None:
        asked.append(name)
        return None if name == "none" else name.upper()

    found = OnDemand(("a", "b", "none"), compute)
    both = first_of({"b": "given"}, found)
    assert [both["b"], both.get("none"), both.get("other"), both["a"], both["a"]] == ["given", None, None, "A", "A"]
    assert asked == ["none", "a"]
    assert list(computed_in(both)) == ["given", "A"]
    assert dict(found) == {"a": "A", "b": "B"}
    assert len(found) == 2


def test_an_error_is_no_missing_value() -> None:
    found = OnDemand[str](("a",), lambda name: {"b": name}[name])
    with pytest.raises(RuntimeError, match="KeyError: 'a' while 'a' was computed"):
        found.get("a")


def test_a_step_that_fits_asks_no_technique_whose_search_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {table.STRATEGIES[name].look or table.STRATEGIES[name].read_step: name for name in SEARCHED}
    asked, import_function = set[str](), technique.function_at

    def function_at(path: str) -> object:
        asked.update([paths[path]] if path in paths else [])
        return import_function(path)

    monkeypatch.setattr("lightning_amp.lightning.profiling.facts_of_step.function_at", function_at)
    lightning_amp.plan(Blocks(), torch.randn(64, 16), device_memory="1GiB")
    assert not asked
    lightning_amp.plan(Blocks(), torch.randn(64, 16), device_memory="20KiB")
    assert asked == {*SEARCHED}
