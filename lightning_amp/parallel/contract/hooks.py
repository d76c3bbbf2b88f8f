"""Hooks that a module would lose, or that would see a part of its values, when a technique replaces it."""

from torch import nn

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_within(module: nn.Module) -> list[str]:
    """Kinds of hooks on calls of a module or of one inside it, by torch's names for them."""
    return [kind for kind in KINDS if any(getattr(part, kind) for part in module.modules())]
