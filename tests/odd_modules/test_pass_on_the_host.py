"""Claim: a pass with values that does not fit a device runs on the host; there it may take what the host has free."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import profile
from lightning_amp.footprint.bounded_step import StepOverBudget
from lightning_amp.footprint.copies import take_notes
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.run.run_settings import RunSettings
from tests.optimised import Optimised


class Wide(Optimised, by=torch.optim.Adam):
    """Its forward pass takes more than a training step of the rows that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 512)

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            scores = self.wide(batch).sum(1)
        return self.wide(batch[scores.topk(4).indices][scores.topk(4).values > -1e9]).square().mean()


def run_settings(n_bytes: int) -> RunSettings:
    return RunSettings(limit_bytes=n_bytes)


def test_a_pass_on_the_host_may_exceed_the_budget() -> None:
    """The budget is for training, which is not running yet."""
    torch.manual_seed(0)
    batch = torch.randn(4096, 8)
    whole = profile(Wide(), batch)
    assert whole.noted
    assert (
        profile_module(Wide(), batch, run_settings=run_settings(whole.peak_bytes // 4)).peak_bytes == whole.peak_bytes
    )


class ByGradient(Wide):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.wide.weight.grad.norm() > 0


@pytest.mark.parametrize(("kind", "passes"), [(Wide, [False, False, True]), (ByGradient, [False, False, True, True])])
def test_a_pass_that_does_not_fit_a_device_runs_on_the_host(
    kind: type[Wide], passes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, batch, tried = kind(), torch.randn(4096, 8), list[Any]()
    whole, before = profile(module, batch), [p.clone() for p in module.parameters()]
    copy, on_the_host = take_notes.copy_with_values, list[Any]()

    def copied(module: Any, *, on_host: bool) -> Any:
        tried.append(on_host)
        twin = copy(module, on_host=on_host)
        on_the_host.extend([twin] * on_host)
        return twin

    def is_elsewhere(module: Any) -> bool:
        return all(module is not twin for twin in on_the_host)

    monkeypatch.setattr(take_notes, "is_elsewhere", is_elsewhere)
    monkeypatch.setattr("lightning_amp.footprint.profile_module.is_elsewhere", is_elsewhere)
    monkeypatch.setattr("lightning_amp.footprint.profile_module.copy_with_values", copied)
    found = profile_module(module, batch, run_settings=run_settings(whole.peak_bytes // 4))
    # without a graph, then with one, on the device; whole steps that do not fit it are no pass
    assert tried == passes
    assert (found.noted, found.peak_bytes) == (True, whole.peak_bytes)
    assert all(map(torch.equal, before, module.parameters()))
    monkeypatch.setattr(take_notes, "HOST_SHARE", 0.0)
    with pytest.raises(Exception, match="cannot be counted without values") as error:
        profile_module(module, batch, run_settings=run_settings(whole.peak_bytes // 4))
    assert isinstance(error.value.__cause__, StepOverBudget)
