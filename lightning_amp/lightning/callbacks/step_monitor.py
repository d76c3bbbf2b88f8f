"""Measure a step of a module without a decoder: which tensors are held when, together with the prediction."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_amp.data.files.write_aside import written_aside
from lightning_amp.footprint.copies.fake_copy import length_of
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.profile_module import REAL
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.footprint.summarize import summarize

SHOWN = 10
"""Modules in a table: those that hold most."""


class StepMeter:
    """Counts a step by storage and by module, from `start` to `stop`."""

    def __init__(
        self, module: LightningModule, optimizers: Iterable[torch.optim.Optimizer], batch: Any
    ) -> None:
        # on a GPU nothing counts that lies in the host's memory, as fsdp's rows may
        device = module.device.type
        self._recorder = StepRecorder(module, device_type=None if device == "cpu" else device)
        self._optimizers, self._batch = list(optimizers), batch

    def start(self, held: Any) -> None:
        """Begin with what the module, its optimisers and the batch hold, whatever else is named."""
        self._recorder.start(self._batch, self._optimizers)

    def read(self) -> tuple[int, int]:
        """Bytes alive, and their peak."""
        return self._recorder.current, self._recorder.peak

    def begin_optimiser(self) -> None:
        """Gradients are whole."""
        self._recorder.begin_optimiser()

    def stop(self) -> None:
        """Look no further."""
        self._recorder.hold_gradients()
        self._recorder.stop()

    def profile(self) -> ModuleProfile:
        """What was counted, after `stop`."""
        found = self._recorder
        size = length_of(self._batch)
        return summarize(found.lives, found.work, found.head, measured=REAL, batch_size=size)


def module_rows(measured: ModuleProfile, predicted: ModuleProfile | None) -> list[dict[str, Any]]:
    """Of the modules that hold most at the peak: module, predicted, measured (bytes) and their ratio."""
    known = {} if predicted is None else {row.fqn: row.n_bytes for row in predicted.modules}
    return [
        {
            "module": row.fqn,
            "predicted": known.get(row.fqn),
            "measured": row.n_bytes,
            "ratio": row.n_bytes / known[row.fqn] if known.get(row.fqn) else None,
        }
        for row in measured.modules[:SHOWN]
    ]


def write_step(
    folder: Path,
    measured: ModuleProfile,
    predicted: ModuleProfile | None,
    *,
    budget_bytes: int | None,
    plot: bool,
) -> list[Path]:
    """Write memory_step.json, and memory.png if requested; returns their paths."""
    plain = {
        "measured": measured.to_dict(),
        "predicted": None if predicted is None else predicted.to_dict(),
    }
    path, picture = folder / "memory_step.json", folder / "memory.png"
    with written_aside(path) as aside:
        aside.write_text(json.dumps(plain))
    if not plot:
        return [path]
    with written_aside(picture) as aside:
        measured.plot(
            aside, predicted=predicted, budget_bytes=budget_bytes, title="memory of a measured step"
        )
    return [path, picture]
