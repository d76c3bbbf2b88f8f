"""Run a block's forward through torch.compile (regional compilation).

Blocks of one class whose parameters have the same shapes share graphs, of which parameters are inputs. Others of the
class have their own, so that Dynamo does not take sizes that differ between blocks for dynamic ones. Exact up to the
rounding of sums, which TorchInductor orders differently. Random numbers are eager's (`fallback_random`), drawn in the
same order, so that dropout and random states do not change.

What lies around the forward stays outside of the graph: hooks of the block (fsdp), a second forward pass (recompute),
torch function modes (logits). A block is a single graph: a graph break, code that cannot be compiled, and more graphs
than torch's limit are errors. On fake tensors nothing is compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from lightning_amp._torch import compiler_errors, has_no_values, is_compiled, outside_function_modes
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import overrides_of
from lightning_amp.techniques.compile.row import CompileBlock
from lightning_amp.techniques.contract.change import Change

Sizes = tuple[tuple[int, ...], ...]
_NUMBERS = count()


def compile_block(module: nn.Module, spec: CompileBlock, mesh: object) -> Change:
    """Run a block's forward through torch.compile.

    Raises:
        InstallError: The block, or a module in it, is compiled already.
    """
    if within := [name for name, child in module.named_modules() if is_compiled(child)]:
        raise InstallError(
            f"compile does not support {type(module).__name__!r}, in which {within[0] or 'the block itself'!r} is"
            " compiled already; compile one of the two"
        )
    sizes = tuple(tuple(tensor.shape) for tensor in (*module.parameters(), *module.buffers()))
    return Change({}, forwards={"": CompiledForward(sizes)})


@dataclass
class CompiledForward:
    """Override that runs the class's forward compiled; made by `compile_block`.

    Attributes:
        sizes: Shapes of its parameters and buffers.
        fqn: Name of the block, for messages.
        checked: Whether no module in the block is computed by another technique.
    """

    sizes: Sizes
    fqn: str = ""
    checked: bool = False

    def installed_at(self, fqn: str, plans: object) -> None:
        """Set the block's name."""
        self.fqn = fqn

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's class, compiled.

        Raises:
            InstallError: The block does not compile to one graph.
        """
        forward = type(module).forward
        if any(map(has_no_values, module.parameters())):
            return forward(module, *args, **kwargs)
        # not earlier: shared batch statistics are installed last
        if not self.checked:
            self._refuse_techniques_within(module)
        with outside_function_modes():
            try:
                return _compiled(forward, self.sizes)(module, *args, **kwargs)
            except compiler_errors() as error:
                first = str(error).strip().partition("\n")[0]
                raise InstallError(
                    f"{self._name(module)} does not compile to one graph: {first}; name blocks without it by blocks=,"
                    " or set compile=False"
                ) from error

    def _refuse_techniques_within(self, module: nn.Module) -> None:
        """Raise an InstallError if a technique computes a module in the block, which may exchange messages there."""
        for name, child in module.named_modules():
            for other in (overrides_of(child) or ()) if name else ():
                raise InstallError(
                    f"{self._name(module)} cannot be compiled: its {name!r} is computed by {other.strategy}, which"
                    " compile does not look into; set compile=False, or name other blocks by blocks="
                )
        self.checked = True

    def _name(self, module: nn.Module) -> str:
        return f"{self.fqn or 'a block'} ({type(module).__name__})"


@cache
def _compiled(forward: Callable[..., Any], sizes: Sizes) -> Callable[..., Any]:
    if isinstance(forward, FunctionType):
        # Dynamo keeps graphs, and the sizes that it has seen, by a code object and its name
        code = forward.__code__.replace(co_name=f"{forward.__name__}_{next(_NUMBERS)}")
        own = FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        forward = own
    return cast(Any, torch.compile(forward, fullgraph=True, options={"fallback_random": True}))  # type: ignore[no-any-return]
