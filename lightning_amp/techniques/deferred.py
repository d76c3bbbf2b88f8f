"""Initialise modules that are on the device "meta", one at a time, when their parameters are split.

Modules follow each other as `module.modules()` has them, and draw from torch's generator, which all ranks share: the
values are those of one process that calls `to_empty`, and then `reset_parameters` of each module in this order.
"""

import torch
from torch import nn

from lightning_amp.errors import ModelError

DROPPED = "_amp_dropped"
"""Mark of a whole parameter without its values."""
DEFERRED = "_amp_deferred"
"""Mark of a module whose own parameters and buffers have no values yet."""


def is_deferred(module: nn.Module) -> bool:
    """Whether a module has parameters on "meta", or such that a fit has left without values."""
    return any(p.is_meta or DROPPED in vars(p) for p in module.parameters())


def check_deferred(module: nn.Module) -> None:
    """Refuse, with a ModelError, a module of which a part has values, or one that cannot give them to itself."""
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
    """Put parameters without memory on a device in the place of those on "meta"; what is shared stays shared."""
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
