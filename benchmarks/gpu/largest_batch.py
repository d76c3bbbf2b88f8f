"""The largest batch that `lightning_amp.plan` predicts for the device, and what becomes of batches around it.

The model is that of language_model.py in float32. Every batch is trained for a few steps by `Trainer(strategy="amp")`,
with segments of torch's allocator that grow, as the strategy sets them, and with its default ones.
"""

import gc
import os
import time

import torch

import lightning_amp
from benchmarks.gpu.device import free_bytes
from benchmarks.gpu.language_model import LanguageModel, fit, sizes_for
from benchmarks.gpu.run_parts import Work
from lightning_amp._torch import ALLOCATOR_VARIABLES, set_allocator
from lightning_amp.errors import AmpError
from lightning_amp.lightning.strategy.hardware import device_budget
from lightning_amp.quantities import format_bytes

AROUND = (0.97, 1.0, 1.03, 0.9, 0.8)
"""Batches that are run, as shares of the largest one predicted; the smaller ones only while none has fitted."""
ASKED = (("S1",), ("S1", "logits"))


def run(work: Work) -> None:
    """A row for each batch."""
    cuda = work.device.type == "cuda"
    sizes, _ = sizes_for(tiny=work.tiny)
    budget = device_budget(work.device, node_ranks=1) if cuda else 64 * 2**20
    work.record.fact(budget_bytes=budget)
    for strategies in ASKED[:1] if work.tiny else ASKED:
        begun = time.monotonic()
        batch = torch.zeros(4, sizes["positions"] + 1, dtype=torch.int64)
        planned = lightning_amp.plan(
            LanguageModel(**sizes), batch, strategies=list(strategies), device_memory=budget
        )
        largest = planned.largest_batch()
        work.record.note(f"{','.join(strategies)}: asked in {time.monotonic() - begun:.1f} s.")
        del planned
        for grow in (True, False) if cuda else (True,):
            fits = False
            for share in AROUND[:2] if work.tiny else AROUND:
                if work.clock.left < 0 or (fits and share < 0.95):
                    continue
                fits |= _try(work, sizes, strategies, largest, share, grow=grow)


def _try(
    work: Work, sizes: dict[str, int], strategies: tuple[str, ...], largest: int, share: float, *, grow: bool
) -> bool:
    gc.collect()
    free_bytes(work.device)
    if work.device.type == "cuda":
        # what somebody has set the strategy leaves
        os.environ.pop(ALLOCATOR_VARIABLES[0], None)
        if not grow:
            os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:False"
            set_allocator("expandable_segments:False")
    rows, begun = int(share * largest), time.monotonic()
    row = {"strategies": ",".join(strategies), "segments_grow": grow, "rows": rows, "of_largest": share}
    try:
        found, seen = fit(work, sizes, rows, strategies, None, "32-true")
    except (torch.OutOfMemoryError, AmpError) as error:
        what = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).splitlines()[0]
        work.record.row(**row, answer=what, measured="", predicted="", reserved="", seconds="")
        return False
    work.record.row(
        **row,
        answer="fits",
        measured=format_bytes(seen.peak_bytes),
        predicted=format_bytes(found["predicted_bytes"]),
        reserved=format_bytes(found["reserved_bytes"] or 0),
        seconds=round(time.monotonic() - begun, 1),
    )
    return True
