"""Predict the seconds of an operator from its floating point operations and the bytes that it moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_amp._torch import FLASH_ATTENTION

aten = torch.ops.aten


def _of_product(*given: Any, out_val: Tensor, **_: Any) -> int:
    """Of matrices, the last two tensors; torch's own formulas look for tensors in all arguments, at any depth."""
    rows = [value for value in given if isinstance(value, Tensor)][-2]
    return 2 * out_val.numel() * rows.shape[-1]


FLOPS = {
    # torch counts these of GPUs only
    **{on_cpu: flop_registry[on_cuda] for on_cpu, on_cuda in FLASH_ATTENTION.items()},
    **flop_registry,
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _of_product),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRates:
    """What an operator takes: as long as its products or the bytes that it reads and writes, and its overhead."""

    matmul_flops: float
    memory_bytes: float
    overhead_seconds: float

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any, moved: int) -> float:
        """Of an operator that reads and writes so many bytes; a view takes none."""
        if getattr(func, "is_view", False):
            return 0.0
        flops = FLOPS.get(getattr(func, "overloadpacket", None))
        n = 0 if flops is None else flops(*args, **kwargs, out_val=result)
        # the roofline model: S. Williams, A. Waterman, D. Patterson, 2009
        return max(n / self.matmul_flops, moved / self.memory_bytes) + self.overhead_seconds


_times = [1]


@contextmanager
def standing_for(times: int) -> Iterator[None]:
    """What runs until the block ends would run so many times; within another such block, so many times each time."""
    _times.append(times * _times[-1])
    try:
        yield
    finally:
        _times.pop()


def times_now() -> int:
    """How many operators the one that runs now stands for, itself included."""
    return _times[-1]
