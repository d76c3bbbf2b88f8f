"""Predict an operator's time in seconds from its FLOPs and the bytes that it moves, or from measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_amp._torch import FLASH_ATTENTION

aten = torch.ops.aten


def _of_product(*given: Any, out_val: Tensor, **_: Any) -> int:
    """Return the FLOPs of a product of the last two tensors; torch's formulas search all nested arguments."""
    rows = [value for value in given if isinstance(value, Tensor)][-2]
    return 2 * out_val.numel() * rows.shape[-1]


def _of_layer(rows: Tensor, *given: Any, until: int, **_: Any) -> int:
    """Return the FLOPs of attention, or of a layer with it, that torch computes in one operator in evaluation.

    Args:
        rows: [batch, row, dim].
        given: The other arguments; the first `until` have the weights, [dim, dim], and after them is the mask.
    """
    batch, n, dim = rows.shape
    weights = sum(value.numel() for value in given[:until] if isinstance(value, Tensor) and value.dim() == 2)
    return 2 * batch * n * weights + 4 * batch * n * n * dim


FLOPS = {
    # torch has formulas for the CUDA variants only
    **{on_cpu: flop_registry[on_cuda] for on_cpu, on_cuda in FLASH_ATTENTION.items()},
    **flop_registry,
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _of_product),
    aten._transformer_encoder_layer_fwd: partial(_of_layer, until=17),
    aten._native_multi_head_attention: partial(_of_layer, until=8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRates:
    """Throughput of a device; an operator takes the longer of its compute and memory times, plus an overhead.

    Attributes:
        operators: Measured operators (costs/measured_operators.py), which correct these times; None without any.
    """

    matmul_flops: float
    memory_bytes: float
    overhead_seconds: float
    operators: Any = None

    @classmethod
    def of(cls, rates: Any) -> "OperatorRates":
        """Return those of the rates of a device (costs/device_rates.py)."""
        return cls(**{name: getattr(rates, name) for name in cls.__dataclass_fields__})

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any, moved: int) -> float:
        """Return the time of an operator that reads and writes `moved` bytes; a view takes none."""
        predicted = self.predicted_seconds(func, args, kwargs, result, moved)
        return predicted if self.operators is None else self.operators.seconds(func._opname, predicted)

    def predicted_seconds(self, func: Any, args: Any, kwargs: Any, result: Any, moved: int) -> float:
        """Return the time by throughput alone."""
        if getattr(func, "is_view", False):
            return 0.0
        flops = FLOPS.get(getattr(func, "overloadpacket", None))
        n = 0 if flops is None else flops(*args, **kwargs, out_val=result)
        # the roofline model: S. Williams, A. Waterman, D. Patterson, 2009
        return max(n / self.matmul_flops, moved / self.memory_bytes) + self.overhead_seconds


_times = [1]


@contextmanager
def standing_for(times: int) -> Iterator[None]:
    """Count each operator in this context `times` times; nested contexts multiply."""
    _times.append(times * _times[-1])
    try:
        yield
    finally:
        _times.pop()


def times_now() -> int:
    """Return how many times the current operator counts."""
    return _times[-1]
