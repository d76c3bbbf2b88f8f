"""A model of each public library in bf16-mixed, trained by techniques beside a plain Trainer, and its peak.

Losses and the change of every parameter are compared with those of the plain fit. They may differ from it as much as it
differs from a plain one in float32, for rounding depends on the order of sums; nearly all are equal to the last bit.
Libraries that are not installed are named.
"""

import gc
import importlib.util
from collections.abc import Callable
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.any_module.values import seed
from benchmarks.gpu.device import Allocated
from benchmarks.gpu.language_model import STEPS, Measure
from benchmarks.gpu.runner import Work, first_line
from benchmarks.gpu.several_ranks import LEAST, MIXED
from benchmarks.gpu.trainer import trainer_for
from benchmarks.zoo.cases import CASES, QUICK
from benchmarks.zoo.subject import Case, made
from lightning_amp.errors import AmpError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification.compare import errors
from tests.any_module import QUIET

CHOICES = (("S1",), ("S1", "recompute"), ("S1", "replay"))
SECONDS = 8.0
"""That a model needs."""
Values = dict[str, Tensor]


def run(work: Work) -> None:
    """A row for each model and set of techniques."""
    wrong, absent = list[str](), list[str]()
    for name in QUICK[:1] if work.tiny else QUICK:
        case = CASES[name]
        if importlib.util.find_spec(case.package) is None:
            absent.append(case.package)
        elif work.has_time(name, SECONDS):
            wrong += _of_model(work, name, case)
    if absent:
        work.record.note(f"Not installed: {', '.join(absent)}.")
    if wrong:
        raise AssertionError(f"{wrong!r} failed, or are wrong by more than rounding")


def _of_model(work: Work, name: str, case: Case) -> list[str]:
    def plain(precision: Any) -> tuple[pl.Trainer, None]:
        cuda = work.device.type == "cuda"
        devices = [work.device.index] if cuda else 1
        options: dict[str, Any] = {"accelerator": "gpu" if cuda else "cpu", "devices": devices, "precision": precision}
        return pl.Trainer(**QUIET, **options, max_epochs=-1, max_steps=STEPS), None

    exact, *_ = _fit(work, case, lambda: plain("32-true"))
    one, *_ = _fit(work, case, lambda: plain(MIXED))
    of_one, wrong = _error(one, exact), list[str]()
    for strategies in CHOICES:
        row: dict[str, Any] = {"model": name, "strategies": ",".join(strategies)}
        try:
            found, peak, strategy = _fit(
                work,
                case,
                lambda strategies=strategies: trainer_for(work, strategies=strategies, steps=STEPS, precision=MIXED),
            )
        except AmpError as error:
            # a module without blocks has nothing to recompute
            work.record.row(**row, answer="refused", said=first_line(error))
            continue
        except Exception as error:
            wrong.append(f"{name}, {row['strategies']}")
            work.record.row(**row, answer="**failed**", said=first_line(error))
            continue
        off, predicted = _error(found, one), strategy.plan.predicted_peak_bytes if strategy and strategy.plan else 0
        right = off <= max(LEAST, of_one)
        wrong += [] if right else [f"{name}, {row['strategies']}"]
        work.record.row(
            **row,
            answer="exact" if right else "**wrong**",
            differs=off,
            plain_from_float32=of_one,
            predicted_bytes=predicted,
            measured_bytes=peak,
            ratio=peak / predicted if predicted else inf,
        )
    return wrong


def _fit(
    work: Work, case: Case, trainer_of: Callable[[], tuple[pl.Trainer, AMPStrategy | None]]
) -> tuple[Values, int, AMPStrategy | None]:
    """Losses and changes of parameters, and the peak of a step."""
    gc.collect()
    seen = Measure(Allocated(work.device))
    module, batch = made(case, torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    trainer, strategy = trainer_of()
    trainer.callbacks.insert(0, seen)
    seed(1)
    trainer.fit(module, DataLoader([batch] * STEPS, batch_size=None))  # type: ignore[arg-type]
    changes = {name: parameter.detach().cpu() - before[name] for name, parameter in module.named_parameters()}
    return changes | {"losses": torch.stack(seen.losses)}, seen.peak_bytes, strategy


def _error(found: Values, other: Values) -> float:
    """The largest relative difference of the losses and of a change; inf for what is not a number."""
    kinds = [{"losses"}, other.keys() - {"losses"}]
    off = [e for kind in kinds for e in errors(*({k: v[k] for k in kind} for v in (found, other))).values()]
    return max(inf if error != error else error for error in off)
