"""Claim: settings are those of the tensor's device, or of the one that is named for a while."""

import pytest
import torch

from lightning_amp.footprint.target_device import launches_operators, settings_of


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_stays_in_its_cache_unless_told_otherwise(device: str) -> None:
    like = torch.empty(2, device=device)
    assert not launches_operators(like)
    with settings_of("cuda"):
        assert launches_operators(like)
        with settings_of("cpu"):
            assert not launches_operators(like)
        assert launches_operators(like)
    assert not launches_operators(like)


def test_an_error_leaves_no_settings_behind() -> None:
    with pytest.raises(ZeroDivisionError), settings_of("cuda"):
        raise ZeroDivisionError
    assert not launches_operators(torch.empty(2))
