"""Describe an out-of-memory error of a training step: module, line, and what was held.

Nothing watches the operators of a step while it trains, for that takes time. What is known is read from the error
itself, whose traceback has the functions that ran:

    a module's function, innermost    its name, and the line of the user's own code
    autograd                          the last parameter, in the order in which they were made, without a gradient yet
    an optimiser                      its class

Where a batch was counted (counted_batches.py), the error itself names operator, tensor and module, and every kind.

Known limits: activations and temporaries are distinguished only where a batch was counted; of a module whose parameters
were made in another order than they are read in, the backward pass names another parameter. Not run on a GPU.
"""

from collections.abc import Iterable
from traceback import walk_tb
from types import FrameType

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_amp.footprint.bounded_step import StepOverBudget, users_line
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.quantities import format_bytes

TOLD = "_amp_told"
"""Attribute of an error that has said where memory ended: it may be caught, and raised again."""


def tell_where(
    error: BaseException, module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device
) -> None:
    """Add to an error's text where memory has ended and what was held; once.

    Args:
        error: With its traceback.
        module: That is trained.
        optimizers: Of the run.
        device: Of this rank.
    """
    if getattr(error, TOLD, False):
        return
    said = [str(error), _place(error, module)]
    if not isinstance(error, StepOverBudget):
        said.append(f"Held were {_held(module, optimizers, device)}")
    error.args = (". ".join(text.rstrip(".") for text in said if text),)
    setattr(error, TOLD, True)


def _place(error: BaseException, module: nn.Module) -> str:
    """The innermost function that says where a step was, "" where none does."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    names = {id(child): fqn for fqn, child in module.named_modules()}
    backward = [_is_backward(frame) for frame in frames]
    for k in range(len(frames) - 1, -1, -1):
        owner = frames[k].f_locals.get("self")
        if backward[k]:
            return f"Memory ended in the backward pass{_before(module)}{_line(error)}"
        if isinstance(owner, Optimizer):
            return f"Memory ended in the step of {type(owner).__name__}{_line(error)}"
        if id(owner) in names:
            again = ", again in the backward pass" if any(backward[:k]) else ""
            called = names[id(owner)] or "the module itself"
            return f"Memory ended in {frames[k].f_code.co_name} of {called}{again}{_line(error)}"
    return ""


def _is_backward(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == torch.autograd.__file__ and code.co_name in ("backward", "grad")


def _before(module: nn.Module) -> str:
    missing = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    return f", before there was a gradient of {missing[-1]}" if missing else ""


def _line(error: BaseException) -> str:
    line = users_line(error)
    return f" ({line})" if line else ""


def _held(module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> str:
    """Bytes by kind, as far as they can be told."""
    kinds = {
        PARAMETERS: [*module.parameters(), *module.buffers()],
        GRADIENTS: [p.grad for p in module.parameters() if p.grad is not None],
        STATE: [dict(state) for optimizer in optimizers for state in optimizer.state.values()],
    }
    # on a GPU nothing counts that lies in the host's memory
    other = None if device.type == "cpu" else device.type
    meter, held = LiveBytes(device_type=other), dict[str, int]()
    for kind, values in kinds.items():
        before = meter.current
        meter.watch(values)
        held[kind] = meter.current - before
    if device.type == "cuda":
        more = torch.cuda.memory_allocated(device) - meter.current
        held["activations, temporaries and all else"] = max(0, more)
    return ", ".join(f"{format_bytes(n_bytes)} of {kind}" for kind, n_bytes in held.items())
