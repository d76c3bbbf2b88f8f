"""The unedited modules of examples/any_module/ and a meter, for all tests that claim something of any module."""

import importlib.util
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_amp._torch import GRADIENT
from lightning_amp.footprint.host_state import on_device
from lightning_amp.footprint.live_bytes import LiveBytes
from tests.paths import ROOT

NAMES = ("gene_transformer", "geneformer", "gpt2", "vit", "unet", "evoformer", "wide_mlp", "cnn")
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
"""Options of a Trainer that writes and shows nothing."""


class Meter(pl.Callback):
    """Most bytes alive in the second step of this rank, as `live.peak`; other ranks hold what is on "meta".

    On several ranks, of the step that takes least from the second on: a busy machine may let gloo's threads keep what
    they have summed until after the next operators, in some steps but not in all.

    Args:
        added_up: Batches of a step; the last one is measured.
    """

    kind: type[LiveBytes] = LiveBytes

    def __init__(self, added_up: int = 1) -> None:
        self.live, self.added_up, self.at = LiveBytes(), added_up, 2 * added_up - 1
        self.counting: LiveBytes | None = None
        self.peaks = list[int]()

    def measures(self, trainer: Any, batch_idx: int) -> bool:
        later = batch_idx - self.at
        return later == 0 or (later > 0 and later % self.added_up == 0 and trainer.world_size > 1)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.measures(trainer, batch_idx):
            here = [p for p in module.parameters() if not p.is_meta]
            held = [here, list(map(GRADIENT.__get__, here)), list(module.buffers()), batch]
            for optimizer in on_device(trainer.optimizers):
                held += [value for state in optimizer.state.values() for value in state.values()]
            self.counting = self.kind()
            self.counting.watch(held)
            self.counting.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (counted := self.stop()) is not None:
            self.peaks.append(counted.peak)
            if counted.peak == min(self.peaks):
                self.live = counted

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.stop()

    def stop(self) -> LiveBytes | None:
        """End the count of the current batch, and return it; None if it is not counted."""
        counted, self.counting = self.counting, None
        if counted is not None:
            counted.__exit__(None, None, None)
        return counted


class MeterOfAll(Meter):
    """Most bytes of any batch, as `peak`."""

    def measures(self, trainer: Any, batch_idx: int) -> bool:
        return True

    @property
    def peak(self) -> int:
        return max(self.peaks)


def load(name: str) -> Any:
    """The file as a module; the test is skipped where HuggingFace's transformers are needed and absent."""
    path = ROOT / "examples" / "any_module" / f"{name}.py"
    if "import transformers" in path.read_text() or "from transformers" in path.read_text():
        pytest.importorskip("transformers")
    key = f"any_module_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


def make(name: str, **sizes: int) -> tuple[pl.LightningModule, Any]:
    """A module and a batch, always the same."""
    file = load(name)
    torch.manual_seed(0)
    (kind,) = (
        c
        for c in vars(file).values()
        if isinstance(c, type) and issubclass(c, pl.LightningModule) and c.__module__ == file.__name__
    )
    return kind(), file.make_batch(**sizes)
