"""Call a module with other tensors in place of its parameters and buffers.

A tensor in two places has both replaced by what is given for each; a module that is a child in two places counts once.
torch.func.functional_call goes by all names of such a child, and leaves the other tensors in it when it is done.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.func import functional_call

Result = TypeVar("Result")


def places(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name: one name for every place that can hold another tensor."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        found |= part.named_parameters(prefix, recurse=False, remove_duplicate=False)
        found |= part.named_buffers(prefix, recurse=False, remove_duplicate=False)
    return found


def call_with(tensors: Mapping[str, Tensor], module: nn.Module, call: Callable[[], Result]) -> Result:
    """What a call returns while a module holds other tensors.

    Args:
        tensors: By their names in `places`; the other places keep theirs.
        module: Holds its own tensors again afterwards.
        call: Calls the module, or methods of it.
    """
    named = {f"module.{name}": tensor for name, tensor in tensors.items()}
    return cast(Result, functional_call(_FunctionalCall(module, call), named, tie_weights=False))


class _FunctionalCall(nn.Module):
    """A call of a module, as a module that is called."""

    def __init__(self, module: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self) -> Any:
        return self.call()
