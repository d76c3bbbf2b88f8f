"""Install `offload` around the training step of a LightningModule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp._torch import has_no_values
from lightning_amp.data.batch import tensors_in
from lightning_amp.footprint.confirm_count import shapes_of
from lightning_amp.techniques.checks.planned_order import PlannedOrder
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.host_memory.limit import free_bytes
from lightning_amp.techniques.offload.moves import Moves
from lightning_amp.techniques.offload.row import NAME, Offload
from lightning_amp.techniques.offload.unseen_writes import UnseenWrites
from lightning_amp.techniques.put_methods import Step, method_of, refuse_unseen

SAVES_OTHERS = (
    "offload: the step saves other tensors for the backward pass than the one that was counted for its plan; they"
    " differ first at number {place}, where the step saves {found} bytes, and the count {planned}. Results are exact,"
    " but other tensors wait on the host, so that the peak may differ from the predicted one"
)


def install(module: nn.Module, spec: Offload, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one whose saved tensors wait in host memory."""
    refuse_unseen(NAME, module)
    limit = spec.host_memory if spec.host_memory is not None else free_bytes()
    moves = Moves(least_bytes=spec.least_bytes, leaves=spec.numbers, window=spec.window, limit=limit)
    step, first = method_of(module, "training_step"), iter((True,))
    planned = PlannedOrder(spec.saves, SAVES_OTHERS)

    @contextmanager
    def around(held: Sequence[Tensor], step: Step) -> Iterator[Step]:
        def call(*args: Any, **kwargs: Any) -> Any:
            moves.hold(tensors_in((args, kwargs)))
            moves.shapes = shapes_of((args, kwargs))
            return step(*args, **kwargs)

        # without values there is nothing to compare
        begins = next(first, False)
        looks = begins and not any(map(has_no_values, held))
        with moves.step(held), UnseenWrites(moves) if looks else nullcontext():
            yield call
        # a first step may save what a module makes only once
        if not begins:
            planned.compare(moves.shapes, moves.candidates, lambda: any(map(has_no_values, held)))

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return step(module, *args, **kwargs)
        with around([*module.parameters(), *module.buffers()], partial(step, module)) as call:
            return call(*args, **kwargs)

    run.moves = moves  # type: ignore[attr-defined]
    if "training_step" not in vars(module):
        # stages call the step of the class
        run.around_calls = around  # type: ignore[attr-defined]
    return Change({}, methods={"training_step": run})


def moves_of(module: nn.Module) -> Moves | None:
    """Return the moves of a module on which `offload` is installed; None for another module."""
    put = vars(module).get("training_step")
    found: Moves | None = getattr(getattr(put, "__func__", put), "moves", None)
    return found
