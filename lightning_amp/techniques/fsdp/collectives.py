"""Run the two collectives of a `fully_shard` unit: all-gather of parameters, reduce-scatter of gradients.

gloo has no collective that adds up in parts (dist/collectives.py has one).

Legend: R ranks, n numbers of a rank's part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_amp.dist.collectives import start_adding_rows
from lightning_amp.techniques.ranks.agreement import Agreement

# torch 2.13 renames both and warns of the old names
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Comm:
    """Of one unit, `fqn`; torch asks it for memory, and calls it."""

    def __init__(self, fqn: str, agreement: Agreement) -> None:
        self._fqn, self._agreement = fqn, agreement

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Comm):
    """Every rank's part of the parameters [n] to the whole [R n]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather them; a ModelError where another rank gathers those of another unit."""
        self._agreement.on(f"gathers the parameters of {self._fqn!r}")
        work: dist.Work | None = _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class AddUp(_Comm):
    """The sum or the mean over the ranks of [R n], the own part [n] of it.

    Args:
        fqn, agreement: As above.
        reached: Names of the parameters that the backward pass has reached on this rank since the last time.
    """

    def __init__(self, fqn: str, agreement: Agreement, reached: Callable[[], list[str]]) -> None:
        super().__init__(fqn, agreement)
        self._reached = reached

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Add up; a ModelError where another rank has gradients of other parameters."""
        self._agreement.on(f"adds up the gradients of {self._reached()!r} in {self._fqn!r}")
        if dist.get_backend(group) != "gloo":
            work: dist.Work | None = _REDUCE_SCATTER(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            return work
        start_adding_rows(input_tensor.view(group.size(), -1), group, out=output_tensor)()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
