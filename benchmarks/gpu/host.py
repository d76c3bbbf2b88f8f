"""Activations that wait on the host: losses, bytes on both sides, and the share of the copies that computation hides.

A language model at three lengths, each with as many words in a batch. `recompute` says which peak the others get as
their budget. Two rows in float32, with everything on its way that may leave, have to give the losses of the plain fit:
a copy that is read too early or overwritten would change them.
"""

import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.gpu.device import wait
from benchmarks.gpu.language_model import GOAL, MEASURED, Measure, fit
from benchmarks.gpu.runner import Work, first_line
from lightning_amp.techniques.offload.install import moves_of
from lightning_amp.techniques.offload.row import NAME

EXACT = ("S1", "offload"), ("S1", "replay", "offload")
AT_PEAK = ("S1", "offload"), ("S1", "replay", "offload"), ("S1", "replay")
"""What gets the peak of `recompute` as its budget."""
ALLOWED = 1e-5
"""Relative error of a loss in float32 that is rounding: kernels may add in another order."""
ROOM = 1.01
"""Budget of the others, as a share of the peak of `recompute`."""
COPIED, COPIES = 2**28, 4
"""Bytes of a copy by which the link is timed, and how many there are."""


class MeasureHost(Measure):
    """Also the bytes of the pool on the host, and those that left in the measured step; predicted and measured."""

    host_bytes = moved_bytes = 0
    predicted = 0, 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """Read them, if tensors leave."""
        super().on_train_batch_end(trainer, module, outputs, batch, i)
        if i == MEASURED and (moves := moves_of(module)) is not None:
            self.host_bytes, self.moved_bytes = moves.pool.n_bytes, sum(moves.sizes)
            strategy: Any = trainer.strategy
            spec = strategy.plan.spec_of(NAME)
            self.predicted = spec.host_bytes, spec.moved_bytes


def sizes_for(length: int, *, tiny: bool) -> tuple[dict[str, int], int]:
    """The model's sizes, and rows of a batch."""
    if tiny:
        return {"width": 16, "heads": 2, "depth": 3, "words": 60, "positions": length // 64}, 4
    return {"width": 1024, "heads": 16, "depth": 8, "words": 4000, "positions": length}, max(1, 2**15 // length)


def run(work: Work) -> None:
    """Losses in float32, then a row for each length and choice."""
    link = link_seconds(work.device)
    work.record.fact(seconds_per_byte_there_and_back=link)
    wrong = exact(work)
    for length in (2048, 8192, 512):
        wrong += at_length(work, length, link)
    if wrong:
        raise AssertionError(f"{wrong!r} failed, are wrong, or are further than {GOAL:.0%} from the prediction")


def exact(work: Work) -> list[str]:
    """Compare losses of a few steps in float32 with those of the plain fit; return what is wrong."""
    sizes, _ = sizes_for(2048, tiny=work.tiny)
    _, plain = fit(work, sizes, 2, ("S1",), None, "32-true")
    wrong = list[str]()
    for strategies in EXACT:
        name = ",".join(strategies)
        try:
            _, found = fit(work, sizes, 2, strategies, None, "32-true", kind=MeasureHost)
        except Exception as failure:
            wrong.append(name)
            work.record.row(exact=name, loss_error=None, moved_bytes=None, answer=first_line(failure))
            continue
        error = max(float(abs(a - b) / abs(b)) for a, b in zip(found.losses, plain.losses, strict=True))
        answer = "exact" if error <= ALLOWED else "**wrong**"
        wrong += [name] if error > ALLOWED else []
        work.record.row(exact=name, loss_error=error, moved_bytes=found.moved_bytes, answer=answer)
    return wrong


def at_length(work: Work, length: int, link: float) -> list[str]:
    """Write a row for each choice at a length; return those that are wrong."""
    sizes, rows = sizes_for(length, tiny=work.tiny)
    wrong, plain, budget = list[str](), 0.0, None
    for strategies in (("S1",), ("S1", "recompute"), *AT_PEAK):
        name = ",".join(strategies)
        if not work.has_time(f"{name} at length {length}", 4.0):
            break
        within = budget if strategies in AT_PEAK else None
        try:
            row, found = fit(work, sizes, rows, strategies, within, "bf16-mixed", kind=MeasureHost)
        except Exception as failure:
            wrong.append(f"{name} at {length}")
            work.record.row(length=length, failed=name, answer=first_line(failure))
            continue
        seconds = median(found.seconds[MEASURED + 1 :])
        plain, ratio = plain or seconds, found.peak_bytes / row["predicted_bytes"]
        budget = int(ROOM * found.peak_bytes) if name == "S1,recompute" else budget
        if abs(ratio - 1) > GOAL or found.predicted != (found.host_bytes, found.moved_bytes):
            wrong.append(f"{name} at {length}")
        work.record.row(
            length=length,
            plan=row["plan"],
            predicted_bytes=row["predicted_bytes"],
            measured_bytes=found.peak_bytes,
            ratio=ratio,
            predicted_host_bytes=found.predicted[0],
            measured_host_bytes=found.host_bytes,
            moved_bytes=found.moved_bytes,
            step_seconds=seconds,
            of_plain=seconds / plain,
            # what runs again takes time too, so that this is the least
            hidden=max(0.0, 1 - (seconds - plain) / (link * found.moved_bytes)) if found.moved_bytes else None,
        )
    return wrong


def link_seconds(device: torch.device) -> float:
    """Return the seconds in which a byte leaves for pinned memory of the host and comes back, one after the other."""
    here = torch.empty(COPIED if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    there = torch.empty(here.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    took = list[float]()
    for _ in range(COPIES):
        wait(device)
        begun = time.perf_counter()
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        wait(device)
        took.append(time.perf_counter() - begun)
    return min(took) / here.nbytes
