"""Pack and pad sequences on fake tensors, where torch's operators read and write lengths in memory that is not there.

The tensors made are those of torch's operators. To pad: the result, and one copy into it for every stretch of steps
with as many rows. In the backward pass of packing: the gradient, and one copy into it for every step.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import recurrent_functions


class _PackRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        packed, batch_sizes = _packed_by_torch(rows, lengths, batch_first)
        ctx.shape, ctx.batch_first, ctx.sizes = rows.shape, batch_first, batch_sizes.tolist()
        # as torch's node; they have values, for which as many bytes are counted once more
        ctx.save_for_backward(batch_sizes)
        ctx.mark_non_differentiable(batch_sizes)
        return packed, batch_sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, batch, *others = ctx.shape
        found = gradients[0].new_zeros((batch, rows, *others) if ctx.batch_first else ctx.shape)
        at = 0
        for step, size in enumerate(ctx.sizes):
            found[step].narrow(0, 0, size).copy_(gradients[0].narrow(0, at, size))
            at += size
        return found.transpose(0, 1) if ctx.batch_first else found, None, None


_packed_by_torch = recurrent_functions._pack_padded_sequence


def pack_rows(rows: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the packed rows and the number of rows of each step; arguments as in `pack_padded_sequence`."""
    found: tuple[Tensor, Tensor] = _PackRows.apply(rows, lengths, batch_first)  # type: ignore[no-untyped-call]
    return found


def pad_rows(
    rows: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return the padded rows, and lengths without values.

    Args:
        rows: Rows of all steps, on fake tensors.
        batch_sizes: Number of rows of each step, with values.
        batch_first, padding_value, total_length: As in `torch.nn.utils.rnn.pad_packed_sequence`.
    """
    sizes: list[int] = batch_sizes.tolist()
    found = rows.new_full((max(len(sizes), total_length), sizes[0], *rows.shape[1:]), padding_value)
    step = row = 0
    for size, stretch in groupby(sizes):
        steps = len([*stretch])
        part = rows.narrow(0, row, steps * size).view(steps, size, *rows.shape[1:])
        found.narrow(0, step, steps).narrow(1, 0, size).copy_(part)
        step, row = step + steps, row + steps * size
    return found.transpose(0, 1) if batch_first else found, torch.empty(sizes[0], dtype=torch.int64)
