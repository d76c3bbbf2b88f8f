"""Read the shape of a module for its plan, with what its decoder does not support on this machine."""

from dataclasses import replace

import torch
from torch import nn

from lightning_amp.costs.model_shape import ModelShape, with_counts
from lightning_amp.installing.describe_module import describe, with_unsupported
from lightning_amp.models.glue import GLUE

ADAM_SLOTS = 2
"""Optimiser values per weight, assumed for modules other than the reference model: optimisers do not exist yet."""
RMSPROP_SLOTS = 1


def shape_of_module(module: nn.Module, *, batch_size: int, queries: int | None = None) -> ModelShape:
    """Return the shape of a module; the module does not change.

    Args:
        batch_size: Cells per rank and modality.
        queries: Requested queries of a chunk of attention.
    """
    reference = isinstance(module, GLUE)
    slots = RMSPROP_SLOTS if reference else ADAM_SLOTS
    shape = with_unsupported(module, describe(module, batch_size=batch_size, optimizer_slots=slots))
    # the reference model's activations outside its strata are known from its data
    shape = shape if reference else with_counts(shape)
    return replace(shape, decoder=replace(shape.decoder, threads=torch.get_num_threads(), queries=queries))
