"""Read the ModelShape of a module for planning."""

from torch import nn

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.footprint.find_blocks import blocks_with_own_parameters, longest_list
from lightning_amp.installing.describe_decoder import with_decoder
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.data.batch_norm import has_batch_norms


def describe(
    module: nn.Module, *, batch_size: int, base_activation_bytes: int = 0, optimizer_slots: int = 1
) -> ModelShape:
    """Read a module's shape, with the largest detected decoder.

    Args:
        module: The complete LightningModule.
        batch_size: Cells per rank and modality.
        base_activation_bytes: Bytes saved for the backward pass outside the decoder.
        optimizer_slots: Copies of the parameters that the optimiser keeps (RMSprop 1, Adam 2).
    """
    sizes = [p.element_size() for p in module.parameters() if p.is_floating_point()]
    shape = ModelShape(
        batch_size=batch_size,
        parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        base_activation_bytes=base_activation_bytes,
        optimizer_slots=optimizer_slots,
        element_bytes=max(sizes, default=4),
        batch_norms=has_batch_norms(module),
        blocks=tuple(blocks_with_own_parameters(module)),
        block_list=longest_list(module),
    )
    decoders = find_decoders(module)
    return with_decoder(shape, module, decoders) if decoders else shape
