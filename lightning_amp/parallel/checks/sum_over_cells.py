"""Whether the loss of some cells is a sum over cells, which taking them in micro-batches relies on.

    nll(cells a and b) = nll(cell a) + nll(cell b)

Looked at once, with two cells and without gradients. A mean over cells, cells that are centred or normalised by each
other, and terms that no cell has (a penalty on weights) make the two sides differ.

Legend: cell (B), anchor (N), dim (D).
Known limits: what changes the loss by less than the tolerance is not noticed, nor anything in a loss that draws random
numbers or is only simulated; hooks inside run three times more, and what the stratum counts is counted so often.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensor, multiplies_in_tf32
from lightning_amp.errors import InstallError
from lightning_amp.shapes import PerAnchor, PerCell, Scalar

TOLERANCE = 1e-3
HALF_TOLERANCE = 0.05
"""Relative to the losses; where products are rounded to 16 bits, or to TF32."""


def check_sum(
    nll: Callable[..., Scalar], key: PerAnchor, u: PerCell, rows: Callable[[slice], Mapping[str, Any]]
) -> None:
    """Compare the loss of the first two cells with that of each.

    Raises:
        InstallError: The loss is no sum over cells.
    """
    if isinstance(u, FakeTensor) or u.is_meta:
        return
    with torch.random.fork_rng([u.device] if u.is_cuda else []), torch.no_grad():
        drawn = _random_states(u.device)
        parts = (slice(0, 2), slice(0, 1), slice(1, 2))
        both, first, second = (float(nll(key, u[part], **rows(part))) for part in parts)
        if not all(map(torch.equal, drawn, _random_states(u.device))):
            return
    tf32 = u.is_cuda and multiplies_in_tf32()
    half = u.dtype.itemsize < 4 or tf32 or torch.is_autocast_enabled(u.device.type)
    room = (HALF_TOLERANCE if half else TOLERANCE) * (abs(both) + abs(first) + abs(second))
    if not abs(both - (first + second)) > room:
        return
    raise InstallError(
        f"a stratum's cells were to be taken in micro-batches, and the loss of two cells is {both!r}, of each"
        f" {first!r} and {second!r}; allowed is a sum over cells: use reduction='sum', normalise cells before it,"
        " add what is not of a cell (a penalty on weights) to the loss outside of it, or leave 'stream' out"
    )


def _random_states(device: torch.device) -> list[Tensor]:
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]
