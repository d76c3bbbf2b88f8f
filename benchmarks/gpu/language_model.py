"""Memory and time of a language model with each technique, and the largest batch.

The model is a decoder with its head and loss inside `training_step`. Predicted are the bytes of the plan that
`Trainer(strategy="amp")` made, measured is the peak of torch's allocator in the third step, above what was allocated
before the module was made.
"""

import gc
import os
import time
from statistics import median
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_amp
from benchmarks.gpu.device import Allocated, free_bytes, wait
from benchmarks.gpu.runner import Work, first_line
from benchmarks.gpu.trainer import trainer_for
from benchmarks.models import GPT
from lightning_amp._torch import ALLOCATOR_VARIABLES, set_allocator
from lightning_amp.errors import AmpError
from lightning_amp.footprint.host_state import on_device
from lightning_amp.lightning.strategy.hardware import device_budget
from lightning_amp.quantities import format_bytes

STEPS, MEASURED = 6, 2
"""Steps of a fit, and the one whose peak is read."""
CASES: tuple[tuple[tuple[str, ...] | None, float | None], ...] = (
    (("S1",), None),
    (("S1", "logits"), None),
    (("S1", "replay"), None),
    (("S1", "logits", "replay"), None),
    (("S1", "recompute"), None),
    (("S1", "logits", "recompute"), None),
    (None, 0.6),
    (("S1", "logits", "recompute", "early_update"), None),
    (None, 0.35),
    (("S1", "host_optimizer"), None),
    (("S1", "logits", "recompute", "host_optimizer", "early_update"), None),
)
"""Strategies, or the share of the plain step's peak that the policy gets as its budget."""
GOAL = 0.05
"""How far predicted and measured bytes may be apart."""
AROUND = (0.97, 1.0, 1.03, 0.9, 0.8)
"""Batches that are run, as shares of the largest one predicted; the smaller ones only while none has fitted."""
ASKED = (("S1",), ("S1", "logits"))


class LanguageModel(GPT):
    """The shared GPT under another optimiser."""

    def __init__(self, *, width: int, heads: int, depth: int, words: int, positions: int) -> None:
        torch.manual_seed(0)
        super().__init__(width, heads, depth, words, positions)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW in one kernel for all parameters, which keeps no temporary copies of them."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Measure(pl.Callback):
    """The losses, the seconds of each step and the peak of one."""

    def __init__(self, allocated: Allocated) -> None:
        self._allocated, self.peak_bytes, self.ready = allocated, 0, 0.0
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The plan is made and installed."""
        self.ready = time.monotonic()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, i: int) -> None:
        """Begin to measure."""
        wait(module.device)
        if i == MEASURED:
            gradients = [parameter.grad for parameter in module.parameters()]
            states = [dict(optimizer.state) for optimizer in on_device(trainer.optimizers)]
            self._allocated.begin([list(module.parameters()), gradients, batch, states])
        self._begun = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """Read the peak and the clock."""
        wait(module.device)
        self.seconds.append(time.perf_counter() - self._begun)
        self.losses.append(outputs["loss"].detach().double().cpu())
        if i == MEASURED:
            self.peak_bytes = self._allocated.end()


def sizes_for(*, tiny: bool) -> tuple[dict[str, int], int]:
    """The model's sizes, and rows of a batch."""
    if tiny:
        return {"width": 16, "heads": 2, "depth": 2, "words": 300, "positions": 32}, 4
    return {"width": 1024, "heads": 16, "depth": 12, "words": 32_000, "positions": 1024}, 16


def run(work: Work) -> None:
    """A row for each case."""
    sizes, rows = sizes_for(tiny=work.tiny)
    _, exact = fit(work, sizes, 2, ("S1",), None, "32-true")
    plain, wrong = 0, list[str]()
    for strategies, share in CASES[::3] if work.tiny else CASES:
        budget = None if share is None else int(share * plain)
        name = ",".join(strategies) if strategies else f"budget {share:.0%}"
        try:
            # exactness in float32, for bf16 rounds what is computed in another order
            _, few = fit(work, sizes, 2, strategies or ("S1",), None, "32-true")
            error = max(float(abs(a - b) / abs(b)) for a, b in zip(few.losses, exact.losses, strict=True))
            row, found = fit(work, sizes, rows, strategies, budget, "bf16-mixed")
        except Exception as failure:
            wrong.append(name)
            work.record.row(case=name, answer=first_line(failure))
            continue
        plain = plain or found.peak_bytes
        off = found.peak_bytes / row["predicted_bytes"] - 1
        if error > 1e-4 or abs(off) > GOAL:
            wrong.append(name)
        work.record.row(
            case=name,
            **row,
            measured_bytes=found.peak_bytes,
            ratio=1 + off,
            share_of_plain=found.peak_bytes / plain,
            step_seconds=median(found.seconds[MEASURED + 1 :]),
            loss_error=error,
        )
    if wrong:
        raise AssertionError(f"{wrong!r} failed, or are further than {GOAL:.0%} from the prediction")


M = TypeVar("M", bound=Measure)


def fit(
    work: Work,
    sizes: dict[str, int],
    rows: int,
    strategies: tuple[str, ...] | None,
    budget: int | None,
    precision: Any,
    *,
    kind: type[M] = Measure,  # type: ignore[assignment]
) -> tuple[dict[str, Any], M]:
    """Train for a few steps: what the plan says, and what was measured."""
    seen = kind(Allocated(work.device))
    module = LanguageModel(**sizes)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(sizes["words"], (rows, sizes["positions"] + 1), generator=generator)
    loader: Any = DataLoader([batch] * STEPS, batch_size=None)  # type: ignore[arg-type]
    amp = {} if budget is None else {"device_memory": budget}
    trainer, strategy = trainer_for(
        work, strategies=strategies, steps=STEPS, amp=amp, callbacks=[seen], precision=precision
    )
    begun = time.monotonic()
    trainer.fit(module, loader)
    assert strategy.plan is not None, "there is a plan after a fit"
    row = {
        "plan": ",".join(strategy.plan.strategies),
        "start_seconds": seen.ready - begun,
        "predicted_bytes": strategy.plan.predicted_peak_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(work.device) if work.device.type == "cuda" else None,
        "predicted_reserved_bytes": strategy.plan.on_device and strategy.plan.on_device.reserved_bytes,
    }
    del trainer, strategy, module, loader
    gc.collect()
    return row, seen


def largest_batch(work: Work) -> None:
    """The largest batch that `lightning_amp.plan` predicts for the device, and what becomes of batches around it.

    Every batch is trained for a few steps in float32, with segments of torch's allocator that grow, as the strategy
    sets them, and with its default ones.
    """
    cuda = work.device.type == "cuda"
    sizes, _ = sizes_for(tiny=work.tiny)
    budget = device_budget(work.device, node_ranks=1) if cuda else 64 * 2**20
    work.record.fact(budget_bytes=budget)
    asked = ASKED[:1] if work.tiny else ASKED
    found = {strategies: _largest(work, sizes, strategies, budget) for strategies in asked}
    for grow in (True, False) if cuda else (True,):
        for strategies, largest in found.items():
            fits = False
            for share in AROUND[:2] if work.tiny else AROUND:
                if work.clock.left < 0 or (fits and share < 0.95):
                    continue
                fits |= _try(work, sizes, strategies, largest, share, grow=grow)


def _largest(work: Work, sizes: dict[str, int], strategies: tuple[str, ...], budget: int) -> int:
    begun = time.monotonic()
    batch = torch.zeros(4, sizes["positions"] + 1, dtype=torch.int64)
    planned = lightning_amp.plan(LanguageModel(**sizes), batch, strategies=list(strategies), device_memory=budget)
    largest = planned.largest_batch()
    work.record.note(f"{','.join(strategies)}: asked in {time.monotonic() - begun:.1f} s.")
    return largest


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
