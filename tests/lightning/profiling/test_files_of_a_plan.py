"""Claim: the plan of a module without a Hi-C decoder is made without the planner, and the adapters, of decoders."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import AMPStrategy
from tests.lightning.profiling.test_no_side_effects import trainer_of
from tests.optimised import Optimised

ROOT = Path(lightning_amp.__file__).parent
OF_DECODERS = (
    *(
        "planning/policies/",
        "planning/memory/",
        "planning/time/",
        "planning/sizes.py",
        "planning/modules/plan_decoder.py",
    ),
    *("adapters/forms/", "installing/describe_decoder.py", "techniques/hic/"),
)


class Blocks(Optimised, by=torch.optim.SGD, lr=0.1):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.blocks(batch).square().mean()


def fitted(strategy: AMPStrategy) -> None:
    trainer_of(strategy, max_steps=1).fit(Blocks(), DataLoader(torch.randn(64, 64), batch_size=32))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory", [None, "150KiB"])
def test_no_file_of_decoders_is_entered(memory: str | None) -> None:
    # imports are not calls of a planner
    fitted(AMPStrategy(device_memory=memory))
    entered = set[str]()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    strategy = AMPStrategy(device_memory=memory)
    setup = strategy.setup

    def traced(trainer: object) -> None:
        sys.setprofile(called)
        try:
            setup(trainer)
        finally:
            sys.setprofile(None)

    strategy.setup = traced
    fitted(strategy)
    assert strategy.plan is not None
    assert strategy.plan.fits is not False
    own = {str(Path(path).relative_to(ROOT)) for path in entered if path.startswith(str(ROOT))}
    assert "planning/base/base_plan.py" in own
    assert sorted(path for path in own if path.startswith(OF_DECODERS)) == []
