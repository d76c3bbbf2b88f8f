"""Detect and check modules with parameters on the device "meta", and replace these by parameters without memory.

When parameters are sharded (tensor3d/units.py), modules are initialized one at a time, in the order of
`module.modules()`, with torch's generator, whose state is equal on all ranks. The values equal those of one process
that calls `to_empty` and then `reset_parameters` of each module.
"""

import torch
from torch import nn

from lightning_amp.errors import ModelError

DROPPED = "_amp_dropped"
"""Attribute that marks a full parameter whose values were dropped."""
DEFERRED = "_amp_deferred"
"""Attribute that marks a module whose direct parameters and buffers have no values yet."""


def is_deferred(module: nn.Module) -> bool:
    """Whether a module has parameters on "meta", or parameters whose values an earlier fit has dropped."""
    return any(p.is_meta or DROPPED in vars(p) for p in module.parameters())


def check_deferred(module: nn.Module) -> None:
    """Raise a ModelError if only some parameters have values, or if a module on "meta" has no `reset_parameters`."""
    without = {name: p.is_meta or DROPPED in vars(p) for name, p in module.named_parameters()}
    if not all(without.values()):
        one, other = (next(name for name, value in without.items() if value == kind) for kind in (True, False))
        raise ModelError(
            f"the parameter {one!r} is on the device 'meta', and {other!r} is not; make all of them in configure_model"
            " under torch.device('meta'), or none"
        )
    for name, child in module.named_modules():
        own = [t for t in (*child._parameters.values(), *child._buffers.values()) if t is not None]
        if any(t.is_meta for t in own) and not callable(getattr(child, "reset_parameters", None)):
            raise ModelError(
                f"{name or 'the module'!r} ({type(child).__name__}) has tensors on the device 'meta', and no method"
                " reset_parameters to give them values; add one, or make it on a device"
            )


def without_memory(module: nn.Module, device: torch.device) -> None:
    """Replace parameters on "meta" by expanded nan scalars on a device, buffers by zeros; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, old in child._parameters.items():
            if old is None or not (old.is_meta or DROPPED in vars(old)):
                continue
            if id(old) not in made:
                empty = torch.full((), torch.nan, dtype=old.dtype, device=device).expand(old.shape)
                made[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad) if old.is_meta else old
                made[id(old)].data = empty
                vars(made[id(old)])[DROPPED] = True
            if old.is_meta:
                vars(child)[DEFERRED] = True
            child._parameters[name] = made[id(old)]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                vars(child)[DEFERRED] = True
                child._buffers[name] = torch.zeros_like(buffer, device=device)
            elif buffer is not None:
                child._buffers[name] = buffer.to(device)
