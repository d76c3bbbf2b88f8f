"""What an operator computes and moves, from its arguments and results; fake tensors will do."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_amp.footprint.live_bytes import tensors_of

aten = torch.ops.aten
FLOPS = {
    # torch counts those of GPUs only
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    **flop_registry,
}


class OperatorWork:
    """Sums over the operators of a step.

    Attributes:
        flops: Of matrix products, convolutions and attention, a multiplication and an addition counted as two.
        moved_bytes: Of tensors that operators read and write; views move nothing.
        operators: That are no views.
    """

    def __init__(self) -> None:
        self.flops, self.moved_bytes, self.operators = 0, 0, 0

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operator."""
        if func.is_view:
            return
        count = FLOPS.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=result))
        self.moved_bytes += sum(t.numel() * t.element_size() for t in tensors_of((args, kwargs, result)))
        self.operators += 1

    def to_dict(self) -> dict[str, int]:
        """The sums by name."""
        return dict(vars(self))
