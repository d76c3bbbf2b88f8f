"""Fits of one model: plain, under budgets, with the fewest bytes, with layers that are checkpointed by hand.

Every fit begins with the same seeds and trains STEPS steps of one batch. The meter counts the first two steps; later
ones are timed, in seconds of the processor. A fit under a budget is compared with the plain one: losses, parameters,
buffers and random states.
"""

import os
import random
import re
import time
import traceback
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.any_module.values import Clocked, seed
from benchmarks.page import ROOT
from benchmarks.zoo.subject import Case, Subject, checkpoint_layers, made
from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import parse_bytes
from tests.any_module import QUIET

STEPS, COUNTED = 5, 2
SMALL = 1e-6
"""Values that differences are relative to at least: a bias that a norm takes away is rounding and nothing else."""
AT_LEAST = re.compile(r"requires at least ([\d.,]+ ?\w+)")
Record = dict[str, Any]


class Probe(Clocked):
    """Counts each of the first two steps, notes the losses and when steps end; `peak` has the most bytes of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.losses: list[float] = []
        self.ends: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < COUNTED:
            self.live, self.at = LiveBytes(), batch_idx
            # each of the two is counted, not the smaller one
            self.peaks.clear()
        super().on_train_batch_start(trainer, module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.peak = max(self.peak, self.live.peak)
        self.losses.append(float(outputs["loss"]))
        self.ends.append(time.process_time())


class Fit(NamedTuple):
    """What a fit has left."""

    tensors: dict[str, Tensor]
    losses: list[float]
    random: list[Any]
    peak: int
    step: float
    planning: float
    plan: Plan | None


def fit(
    case: Case, dtype: torch.dtype, optimizer: str, strategy: AMPStrategy | None = None, *, by_hand: bool = False
) -> Fit:
    """Train."""
    module, batch = made(case, dtype, optimizer)
    if by_hand:
        checkpoint_layers(module.network)
    probe = Probe()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        precision="64-true" if dtype == torch.float64 else "32-true",
        callbacks=[probe],
        strategy=strategy or "auto",
        **QUIET,
    )
    seed(1)
    trainer.fit(module, DataLoader([batch] * STEPS, batch_size=None))
    drawn = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1:]]
    counted, *timed = probe.ends[COUNTED - 1 :]
    steps = [b - a for a, b in zip([counted, *timed], timed, strict=False)]
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    plan = strategy and strategy.plan
    return Fit(tensors, probe.losses, drawn, probe.peak, median(steps), probe.seconds, plan)


def be_quiet() -> None:
    """One thread, and no words of libraries: a record has what there is to say."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)


def difference(found: Fit, plain: Fit) -> float:
    """The largest of a loss, parameter or buffer, relative to its largest value or SMALL; inf for unlike ones."""
    if found.tensors.keys() != plain.tensors.keys() or len(found.losses) != len(plain.losses):
        return float("inf")
    pairs = [(found.tensors[name], plain.tensors[name]) for name in plain.tensors]
    pairs.append((torch.tensor(found.losses), torch.tensor(plain.losses)))
    worst = 0.0
    for a, b in pairs:
        if not torch.equal(a, b) and a.numel():
            apart = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=SMALL))
            worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def same_draws(found: Fit, plain: Fit) -> bool:
    """Whether the generators of torch, Python and NumPy are where they were."""
    (a, *others), (b, *of_plain) = found.random, plain.random
    return torch.equal(a, b) and repr(others) == repr(of_plain)


def fits_of(case: Case, optimizer: str, dtype: torch.dtype, kinds: tuple[str, ...]) -> Iterator[Record]:
    """Yield what each fit has left, of kinds such as "plain", "by hand", "50%" of plain's bytes, and "least"."""
    plain = fit(case, dtype, optimizer)
    refused: Record = {}
    for kind in kinds:
        if kind == "plain":
            module, batch = made(case, dtype)
            held = sum((1 + p.requires_grad) * p.nbytes for p in module.parameters())
            record = {"measured": plain.peak, "held": held, "float32": computes_in_float32(module, batch)}
        elif kind == "by hand":
            record = _by_hand(case, dtype, optimizer)
        elif kind == "least":
            record = _under(case, dtype, optimizer, plain, None)
        else:
            budget = plain.peak * int(kind.rstrip("%")) // 100
            # a refusal has said what is enough: less is refused too
            known = refused | {"budget": budget, "planning": None}
            record = known if budget < refused.get("needs", 0) else _under(case, dtype, optimizer, plain, budget)
            refused = record if record.get("needs") else refused
        yield {"kind": kind, "plain step": plain.step, **record}


def computes_in_float32(module: Subject, batch: Any) -> bool:
    """Whether the network saves tensors of less precision than float64, as RMSNorm of transformers does."""
    found = set[torch.dtype]()

    def note(x: Tensor) -> Tensor:
        found.add(x.dtype)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        module.training_step(batch, 0)
    return bool(found & {torch.float32, torch.bfloat16, torch.float16})


def _by_hand(case: Case, dtype: torch.dtype, optimizer: str) -> Record:
    record: Record = {"switch": checkpoint_layers(made(case, dtype)[0].network)}
    try:
        found = fit(case, dtype, optimizer, by_hand=True)
    except Exception as error:
        return record | {"crashed": said(error)}
    return record | {"measured": found.peak, "step": found.step}


def _under(case: Case, dtype: torch.dtype, optimizer: str, plain: Fit, budget: int | None) -> Record:
    """A fit under a budget; None asks for the fewest bytes."""
    least = {"device_memory": "1KiB", "on_predicted_oom": "warn"}
    strategy = AMPStrategy(**(least if budget is None else {"device_memory": budget}))
    begun = time.process_time()
    try:
        found = fit(case, dtype, optimizer, strategy)
    except AmpError as error:
        needs = AT_LEAST.search(str(error))
        return {
            "budget": budget,
            "refused": said(error),
            "needs": parse_bytes(needs[1].replace(",", "")) if needs else None,
            "planning": time.process_time() - begun,
        }
    except Exception as error:
        return {"budget": budget, "crashed": said(error), "where": _where(error)}
    assert found.plan is not None, "AMPStrategy has one"
    return {
        "budget": budget,
        "plan": list(found.plan.strategies),
        "predicted": found.plan.predicted_peak_bytes,
        "measured": found.peak,
        "step": found.step,
        "planning": found.planning,
        "difference": difference(found, plain),
        "draws": same_draws(found, plain),
    }


def said(error: BaseException) -> str:
    """For a record, without the folders of this machine."""
    return without_folders(f"{type(error).__name__}: {error}")[:600]


def without_folders(text: str) -> str:
    """Paths begin with the name of a package."""
    return re.sub(r"/\S*?/site-packages/", "", text).replace(f"{ROOT}/", "")


def _where(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return [without_folders(f"{frame.filename}:{frame.lineno} {frame.name}") for frame in frames]
