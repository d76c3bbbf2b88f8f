"""Claim: operators that compute a whole layer take the time of its products."""

from typing import Any

import torch
from torch import nn

from lightning_amp._torch import FakeTensorMode, TorchDispatchMode
from lightning_amp.footprint.operator_rates import OperatorRates
from tests.each import each


class Timed(TorchDispatchMode):
    """Seconds of products alone, and names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rates = OperatorRates(matmul_flops=1.0, memory_bytes=float("inf"), overhead_seconds=0.0)
        self.seconds, self.names = 0.0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seconds += self.rates.seconds(func, args, kwargs or {}, found, 0)
        self.names.add(func._opname)
        return found


@each(masked=(False, True))
def test_a_layer_in_one_operator_takes_the_time_of_its_products(masked: bool) -> None:
    seconds, names = list[float](), list[set[str]]()
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with FakeTensorMode(), torch.no_grad():
                layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True).eval()
                mask = torch.zeros(7, 7) if masked else None
                with Timed() as timed:
                    layer(torch.empty(2, 7, 24), mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        seconds.append(timed.seconds)
        names.append(timed.names)
    assert names[0] & {"_transformer_encoder_layer_fwd"}
    assert not names[1] & {"_transformer_encoder_layer_fwd"}
    assert seconds[0] == seconds[1]
