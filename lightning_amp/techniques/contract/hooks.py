"""Find hooks that a replacement would not run, or would call with a part of the values."""

from torch import nn

from lightning_amp.footprint.hooked import hooked

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_within(module: nn.Module) -> list[str]:
    """Kinds of hooks on calls of a module or of one inside it."""
    return hooked(module.modules(), KINDS)


def hooks_of(parameter: nn.Parameter, name: str) -> list[str]:
    """Kinds of hooks on a parameter, after its name."""
    return [f"{name}.{kind.strip('_')}" for kind in OF_PARAMETERS if getattr(parameter, kind)]
