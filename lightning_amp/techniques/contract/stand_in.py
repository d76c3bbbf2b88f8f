"""Define decoders that replace a module written elsewhere, which keeps its parameters, names and children.

Such a module has a `StandIn` for its `forward`, set on the instance. Techniques change the decoder behind it: below the
module's name, rules meet the decoder's children (`decoders.hic.strata.3.key.attention`) and not the module's own.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


class StandIn:
    """A forward that runs a decoder in place of a module's own.

    Not a module, so that setting it registers nothing. A copy of the module has a copy of it.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder

    def __call__(self, *args: Any) -> Any:
        """Overridden by what the module's callers expect."""
        raise NotImplementedError


def in_place_of(module: nn.Module) -> nn.Module:
    """The decoder that stands in for a module, or the module itself."""
    forward = vars(module).get("forward")
    return forward.decoder if isinstance(forward, StandIn) else module


def part(module: nn.Module, fqn: str) -> nn.Module:
    """The module of a name, through what stands in for modules on the way, and for the last one."""
    for name in fqn.split(".") if fqn else ():
        module = in_place_of(module).get_submodule(name)
    return in_place_of(module)


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, with those of a decoder that stands in for a module in place of the module's own."""
    hidden: list[str] = []
    for fqn, child in module.named_modules():
        if any(fqn.startswith(f"{outer}." if outer else "") for outer in hidden):
            continue
        decoder = in_place_of(child)
        if decoder is child:
            yield fqn, child
        else:
            hidden.append(fqn)
            yield from decoder.named_modules(prefix=fqn)
