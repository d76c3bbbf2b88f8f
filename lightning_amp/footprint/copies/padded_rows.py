"""Pad a packed sequence on fake tensors, which torch's operator cannot: it writes lengths to memory that is not there.

The tensors made are those of torch's operator: the result, and one copy into it for every stretch of steps with as many
rows.
"""

from itertools import groupby

import torch
from torch import Tensor


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
