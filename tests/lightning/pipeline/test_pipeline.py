"""Claim: an unedited module trained as stages of a pipeline ends with the parameters of one process (float64, 1e-10),
logs, clips and returns the same, and every rank holds its own stage only.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.pipeline.pipeline_cases import CNN, GPT, fit
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
Run = dict[str, Any]


def close(found: Run, expected: Run) -> None:
    for name, value in expected["state"].items():
        assert torch.allclose(found["state"][name], value, rtol=0, atol=1e-10), name
    assert found["logged"] == pytest.approx(expected["logged"], abs=1e-10)
    assert found["norms"] == pytest.approx(expected["norms"], abs=1e-10)
    for ours, theirs in zip(found["outputs"], expected["outputs"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-10) for key in theirs)


def everything(rank: int, ranks: int, folder: Path) -> dict[Any, Run]:
    found = {}
    for kind in (GPT, CNN):
        for schedule in SCHEDULES:
            if schedule == "interleaved" and ranks == 4 and kind is GPT:
                continue
            for name, options in OPTIONS.items():
                settings = {"schedule": schedule, "micro_batches": 4}
                found[kind.__name__, schedule, name] = fit((rank, ranks), kind(), settings, options)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_as_stages_is_training_on_one_process(ranks: int, tmp_path: Path) -> None:
    runs = run_ranks(everything, ranks, tmp_path, tmp_path, timeout=300)
    expected = {
        (kind.__name__, name): fit(None, kind(), {}, options)
        for kind in (GPT, CNN)
        for name, options in OPTIONS.items()
    }
    for rank, found in enumerate(runs):
        for (kind, schedule, name), run in found.items():
            print(rank, kind, schedule, name)
            close(run, expected[kind, name])
