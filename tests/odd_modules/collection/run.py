"""Train a row of the collection on one process or on a rank, with a technique or without, and compare the two."""

import random
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import AmpError
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.installing.install import Installed, install_rules
from lightning_amp.lightning.consistency.replicas import check_replicas
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.early_update.row import EarlyUpdate
from lightning_amp.techniques.host_optimizer.row import HostOptimizer
from lightning_amp.techniques.logits.row import ChunkLogits
from lightning_amp.techniques.offload.row import Offload
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.replay.row import ReplayOperators
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.lightning.strategy.test_fsdp import whole
from tests.odd_modules.collection.row import STEPS, Row

FORCED: dict[str, tuple[Spec, ...]] = {
    "recompute": (RecomputeBlock(),),
    "chunk": (ChunkBlock(budget_bytes=1),),
    "replay": (ReplayOperators(ends="1000000"), ReplayOperators(ends="5,9+,11-,16,1000000+", window=64)),
    "offload": (Offload(least_bytes=1), Offload(least_bytes=1, window=200)),
    "logits": (ChunkLogits(),),
    "early_update": (EarlyUpdate(bucket_bytes=1), EarlyUpdate(bucket_bytes=20)),
    "host_optimizer": (HostOptimizer(slot_bytes=2**13), HostOptimizer(slot_bytes=2**13, slots=2)),
}
"""Specs of the techniques of one device, which a plan would install where they save something: here they are on all
blocks, or on the whole step."""
ON_BLOCKS = ("recompute", "chunk")
BIT_BY_BIT = ("recompute", "replay", "offload", "early_update", "host_optimizer")
"""They compute the same by the same operators."""
BOUND = 1e-10


RANKS_DIFFER = "differ between ranks that should have the same"


class Warned(Exception):
    """Of a run that ended well, with a warning that ranks train different models."""


class Seen(Callback):
    """Loss of every step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None and "loss" in outputs:
            self.found[f"step {batch_idx} loss"] = outputs["loss"].detach().clone()


class SeenGradients(Seen):
    """Gradients of every step, too."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        step = f"step {trainer.global_step}"
        named = module.named_parameters()
        self.found |= {f"{step} gradient {name}": whole(p.grad) for name, p in named if p.grad is not None}


def batches_of(row: Row) -> list[Any]:
    drawn = [row.batch() for _ in range(STEPS)]
    return drawn[0] if isinstance(drawn[0], list) else drawn


def tensors_of(module: Any) -> dict[str, Tensor]:
    """Parameters and buffers that have values; a state may have other things."""
    state = module.state_dict().items()
    return {key: value.detach() for key, value in state if isinstance(value, Tensor) and not is_lazy(value)}


def trained(
    row: Row,
    strategy: Any = "auto",
    *,
    install: Callable[[Any], Installed] | None = None,
    part: Callable[[Any], Any] = lambda batch: batch,
    gradients: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Everything that has to be equal after some steps: losses, gradients, state, what was logged, what is drawn next.

    Args:
        row: The module, made anew.
        strategy: Of the Trainer.
        install: Called with the module before the Trainer gets it; undone after the fit.
        part: Batch -> the rows of a rank.
        gradients: Whether they are read, which tensor3d and early_update forbid in a step.
        **options: Of `trainer_of`.
    """
    seed_everything(3, verbose=False)
    batches = [part(batch) for batch in batches_of(row)]
    module, seen = row.make().double(), SeenGradients() if gradients else Seen()
    installed = Installed() if install is None else install(module)
    options = {"max_steps": -1, "num_sanity_val_steps": 0, "use_distributed_sampler": False} | options
    # a batch that a step has written into comes once
    loader = DataLoader(batches, batch_size=None, collate_fn=deepcopy)  # type: ignore[arg-type]
    trainer = trainer_of(strategy, callbacks=[seen], **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader, loader if is_overridden("validation_step", module) else None)
        finally:
            installed.undo()
    if differ := [str(one.message) for one in told if RANKS_DIFFER in str(one.message)]:
        raise Warned(differ[0])
    found = seen.found
    found |= {f"state {name}": value.clone() for name, value in tensors_of(module).items()}
    found |= {f"logged {name}": value.detach().clone() for name, value in trainer.callback_metrics.items()}
    drawn = torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())
    return found | {f"drawn by {name}": value for name, value in zip(("torch", "Python", "NumPy"), drawn, strict=True)}


def has_blocks(row: Row) -> bool:
    return bool(find_blocks(row.make()))


def on_one_device(row: Row, technique: str, spec: Spec | None) -> dict[str, Tensor] | str:
    """What is trained with a technique, or why it is not.

    Args:
        spec: Installed on all blocks, or on the step; None lets AMPStrategy choose.
    """

    def install(module: Any) -> Installed:
        # as AMPStrategy does first
        check_replicas(module, rank=0, broadcast=lambda tensors: tensors, any_rank=bool)
        names = [*find_blocks(module)] if technique in ON_BLOCKS else [""]
        return install_rules(module, [Rule(fqn=name, spec=spec, strategy=technique, why="") for name in names])

    gradients = technique != "early_update"
    try:
        if spec is None:
            return trained(row, AMPStrategy(strategies=technique), gradients=gradients)
        return trained(row, install=install, gradients=gradients)
    except AmpError as error:
        return str(error)


def apart(found: dict[str, Tensor], right: dict[str, Tensor], bound: float) -> str:
    """What differs by more than a bound, as a share of the largest value of a tensor above 1; "" if nothing."""
    if only := sorted(found.keys() ^ right.keys()):
        return f"{only[0]!r} is on one side only"
    for name, value in right.items():
        other = found[name]
        if other.shape != value.shape or other.dtype != value.dtype:
            return f"{name} is {other.dtype} {tuple(other.shape)} instead of {value.dtype} {tuple(value.shape)}"
        if not value.numel() or torch.equal(other, value):
            continue
        error = float((other.double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1))
        if not error <= bound:
            return f"{name} differs by {error:.1e}"
    return ""


def judged(row: Row, technique: str, found: dict[str, Tensor] | str, right: dict[str, Tensor]) -> str:
    """What is wrong with an outcome; "" if it is what the row says."""
    said = row.says.get(technique)
    if isinstance(found, str):
        return "" if said and re.search(said, found, re.DOTALL) else f"refused: {found}"
    if said:
        return f"trained, and the row says {said!r}"
    if technique == "early_update":
        right = {name: value for name, value in right.items() if " gradient " not in name}
    return apart(found, right, 0 if technique in BIT_BY_BIT else BOUND)
