"""Modules of a foreign decoder that ours does not run: hooks on them would not run either.

These are attention and gated activations, which ours computes, and whatever else is not among the layers that ours
shares: a dropout of probability 0, a softmax as a module, the layers of the other kind of key.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_amp.parallel.contract.hooks import KINDS

WATCHERS = ("lightning_amp", "lightning", "pytorch_lightning")
"""Packages whose hooks change nothing: the check for finite numbers, profilers, summaries."""


def hooked(module: nn.Module, decoder: nn.Module) -> list[str]:
    """Names of modules with hooks that would not run.

    Args:
        module: The foreign decoder; it is called itself, and hooks on it run.
        decoder: Ours, with what was installed in it.
    """
    found = dict(_hooked(module))
    run = set(decoder.modules()) if found else set()
    return [fqn for fqn, child in found.items() if child not in run]


def _hooked(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for fqn, child in module.named_modules():
        if fqn and any(not _watches(hook) for kind in KINDS for hook in getattr(child, kind).values()):
            yield fqn, child


def _watches(hook: Any) -> bool:
    source = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return source.split(".")[0] in WATCHERS
