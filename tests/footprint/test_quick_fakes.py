"""Claim: a result that is made from what an earlier call has shown lies in memory as torch's own result does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensorMode
from lightning_amp.footprint.copies import quick_fakes
from lightning_amp.footprint.copies.quick_fakes import QuickFakes

OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "a list of views": lambda x: x.unbind(0),
    "pieces": lambda x: x.split(3, 1),
    "a slice": lambda x: x[1:, ::2],
    "from a real dtype to a complex one": lambda x: torch.view_as_complex(x.unflatten(1, (4, 2))),
    "another dtype": lambda x: x.view(torch.float64),
    "a place in the storage": lambda x: x.as_strided((2, 2), (2, 1), 5),
    "a place that is the tensor's": lambda x: x.as_strided((2, 2), (2, 1)),
    "in place": lambda x: x.add_(1),
    "several results": lambda x: torch.var_mean(x, 1),
    "without a result": lambda x: torch._foreach_add_([x], 1.0),
    "new memory": lambda x: x @ x.T,
}


def layouts(mode: FakeTensorMode, call: Callable[[Tensor], Any], offsets: Sequence[int]) -> list[Any]:
    """Of results for slices of one tensor, from several places on."""
    found = list[Any]()
    with mode:
        whole = torch.empty(20, 8)
        for offset in offsets:
            result = call(whole[offset : offset + 4])
            rows = result if isinstance(result, list | tuple) else [result]
            found.append(type(result))
            for row in (row for row in rows if row is not None):
                same = row.untyped_storage()._cdata == whole.untyped_storage()._cdata
                found.append((row.shape, row.stride(), row.storage_offset(), row.dtype, row.device, same))
    return found


def test_a_second_result_is_as_the_first_at_other_places_too() -> None:
    quick_fakes._known.clear()
    offsets = (0, 4, 4, 10, 2)
    for name, call in OPERATORS.items():
        assert layouts(QuickFakes(), call, offsets) == layouts(FakeTensorMode(), call, offsets), name
        before = len(quick_fakes._known)
        layouts(QuickFakes(), call, offsets)
        assert len(quick_fakes._known) == before, name
    assert None not in quick_fakes._known.values()
