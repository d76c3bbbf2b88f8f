"""Under amp Lightning's summary of a module shows no FLOPs that nobody has counted, and is as before afterwards."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary

from lightning_amp.lightning.callbacks.model_summary import leave_out_flops


class Net(pl.LightningModule):
    def __init__(self, example: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        if example:
            self.example_input_array = torch.ones(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.parametrize("example", [False, True])
def test_flops_are_shown_where_they_were_counted(example: bool, caplog: pytest.LogCaptureFixture) -> None:
    summary = ModelSummary()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[summary])
    model = Net(example)
    with caplog.at_level("INFO"):
        undo = leave_out_flops(trainer)
        summary.on_fit_start(trainer, model)
        undo()
    assert ("FLOPs" in caplog.text) == example
    assert "layer" in caplog.text
    assert ("9 of 9" in caplog.text) == (not example)
    assert "summarize" not in vars(summary)
