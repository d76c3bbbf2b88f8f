"""Group parameters into units that are gathered together: those of a block, and the rest with the root.

A block is a unit where its parameters are its own: one that something else uses too (a tied embedding and head) must be
gathered for both, so such a block is left to the root, which is gathered for the whole of a step. So is a block that
lies in another one, and one of which a step reads parameters without calling it. Parameters without a dimension cannot
be split; they stay whole, and are averaged as under S1.
"""

from collections.abc import Collection

from torch import Tensor, nn

from lightning_amp.footprint.find_blocks import blocks_with_own_parameters
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterShape, ParameterUnit


def units_of(module: nn.Module, apart: Collection[str] = ()) -> tuple[ParameterUnit, ...]:
    """The units of a module with the sizes of their parameters, the root last; the module is whole.

    Args:
        apart: Blocks that are no units.
    """
    taken: set[int] = set()
    found = []
    blocks = {fqn: block for fqn, block in blocks_with_own_parameters(module).items() if fqn not in apart}
    for fqn, block in (*blocks.items(), ("", module)):
        prefix = f"{fqn}." if fqn else ""
        own = [(f"{prefix}{name}", p) for name, p in block.named_parameters() if id(p) not in taken]
        taken |= {id(p) for _, p in own}
        found.append(ParameterUnit(fqn=fqn, parameters=tuple(_shape(name, p) for name, p in own if p.dim())))
    return tuple(found)


def _shape(name: str, parameter: Tensor) -> ParameterShape:
    return ParameterShape(
        name=name, shape=tuple(parameter.shape), item_bytes=parameter.element_size(), trained=parameter.requires_grad
    )
