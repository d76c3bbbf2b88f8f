"""Claim: results of element-wise operators that are known from other lengths are those of torch."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_amp.footprint.copies import quick_fakes
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.copies.results_by_element import ByElement

LENGTHS = (5, 6, 7, 1)
Call = Callable[[int], Tensor]


def into(n: int) -> Tensor:
    whole = torch.ones(3, 2 * n)
    return torch.sub(torch.ones(3, n), torch.ones(1, n), out=whole[:, :n])


CALLS: dict[str, Call] = {
    "one shape": lambda n: torch.ones(3, n) + torch.ones(3, n),
    "one row": lambda n: torch.ones(1, n) * torch.ones(1, n),
    "rows": lambda n: torch.ones(3, n) - torch.ones(1, n),
    "fewer dims": lambda n: torch.ones(n) * torch.ones(3, n),
    "both are expanded": lambda n: torch.ones(3, 1) + torch.ones(1, n),
    "other layouts": lambda n: torch.ones(n, 3).T + torch.ones(n, 3).T,
    "one other layout": lambda n: torch.ones(3, n) + torch.ones(n, 3).T,
    "part of rows": lambda n: torch.ones(3, 9)[:, :n].exp(),
    "dtypes": lambda n: torch.ones(3, n, dtype=torch.float64) * torch.ones(3, n),
    "comparison": lambda n: torch.ones(3, n) > torch.ones(3, n),
    "integers": lambda n: torch.ones(3, n, dtype=torch.int64) / 2,
    "in place": lambda n: torch.ones(3, n).mul_(torch.ones(1, n)),
    "out": into,
    "softplus": lambda n: torch.nn.functional.softplus(torch.ones(3, n)),
    "where": lambda n: torch.where(torch.ones(3, n) > 0, torch.ones(3, n), 1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_torch(name: str) -> None:
    known, found = ByElement.known, list[Any]()

    def noted(self: ByElement) -> Any:
        found.append(known(self))
        return found[-1]

    with patch.object(quick_fakes, "_known", {}), patch.object(ByElement, "known", noted):
        for n in LENGTHS:
            with QuickFakes(valid=True):
                fake = CALLS[name](n)
            real = CALLS[name](n)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), n
            assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes(), n
    if name in ("one shape", "one row", "rows", "out", "in place", "softplus"):
        assert any(one is not None for one in found), "a rule was found once for several lengths"
