"""Run a forward pass with values, to note what they decide (noted_values.py): on its device, or on the host.

The pass takes the parameters, the batch and what is alive at once without gradients, hardly ever more than a budget.
A pass that does not fit a device runs on the host, with copies of the parameters there. A host's budget is for
training, which is not running yet: the pass may take what the host has free.

Random numbers that decide, as in layerdrop, are others in training. So the pass with the most work of several is taken.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
from torch import nn

from lightning_amp.footprint.copies.fake_copy import M, copy_of, tensors_of_all
from lightning_amp.footprint.copies.noted_values import Answers, NoteTaker

HOST_SHARE = 0.75
"""Share of the host's free memory that a pass may take; what needs more cannot be trained there."""


DRAWS = 8
"""Draws of random numbers that are tried where the notes of two steps differ, as if draws decide which blocks run."""


def notes_of(module: nn.Module, why: str, run: Callable[[NoteTaker, bool], Any]) -> Answers | None:
    """Return what values decide in a pass, of several draws in the largest; None if it fails without a backward pass.

    Args:
        module: The module; its tensors are as before at the end.
        why: Why the notes are needed.
        run: Runs the pass with a taker, on the module's device or, if true is given, on the host.
    """
    tensors = tensors_of_all(module)
    for on_host in (False, True) if is_elsewhere(module) else (False,):
        # with a graph, if the step takes gradients by itself
        for gradients in (False, True):
            takers = list[NoteTaker]()
            with suppress(Exception):
                # the host may be many times as slow as the device
                for draw in range(1 if on_host else DRAWS):
                    takers.append(NoteTaker(tensors, gradients=gradients, draw=draw))
                    run(takers[-1], on_host)
                    if not takers[0].varies:
                        break
                return Answers(max(takers, key=lambda taker: taker.made_bytes[-1]), why)
    return None


def is_elsewhere(module: nn.Module) -> bool:
    """Whether a module has tensors on a device that is not the host."""
    return any(tensor.device.type != "cpu" for tensor in tensors_of_all(module))


def copy_with_values(module: M, *, on_host: bool) -> M:
    """Return a copy of a module that shares its parameters' memory, or has all tensors on the host."""
    twin = copy_of(module, None, shares=True)
    return twin.to("cpu") if on_host else twin


def room_of_pass(module: nn.Module, limit_bytes: int | None) -> int | None:
    """Return the most bytes of a pass of a copied module, with its own: `limit_bytes` on a device."""
    if is_elsewhere(module):
        return limit_bytes
    own = sum(tensor.nbytes for tensor in tensors_of_all(module))
    return own + int(HOST_SHARE * psutil.virtual_memory().available)
