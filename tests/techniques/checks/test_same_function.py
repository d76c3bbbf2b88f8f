"""Claim: the comparison behind all checks takes rounding for rounding, and nothing else."""

import torch
from torch import Tensor

from lightning_amp.techniques.checks.same_function import close, difference, largest

ONE = torch.tensor([1.0, 100.0], dtype=torch.float64)
NAN, INF = torch.tensor([torch.nan, 1.0]), torch.tensor([torch.inf, 1.0])


def test_what_is_the_same_and_what_is_not() -> None:
    same: list[tuple[Tensor, Tensor]] = [
        (ONE * (1 + 1e-10), ONE),
        (ONE + 5e-8, ONE),  # as a share of the largest number
        (INF, INF),
        (torch.tensor([True]), torch.tensor([True])),
        (torch.ones(0), torch.ones(0)),
    ]
    other = [
        (ONE + 5e-7, ONE),
        (ONE.float(), ONE),
        (ONE[:, None], ONE),
        (NAN, NAN),
        (NAN, torch.ones(2)),
        (torch.ones(2), NAN),
        (torch.ones(2), INF),
        (-INF, INF),
        (INF, torch.ones(2)),
        (torch.tensor([1]), torch.tensor([2])),
    ]
    assert all(close(found, right, rtol=1e-9) for found, right in same)
    assert not any(close(found, right, rtol=1e-9) for found, right in other)
    assert close(NAN, NAN, rtol=1e-9, equal_nan=True)
    assert not close(NAN, INF, rtol=1e-9, equal_nan=True)
    assert not close(ONE + 5e-8, ONE, rtol=1e-9, scale=1.0)


def test_the_difference_is_named() -> None:
    for found, right, said in (
        ({"y": ONE + 1}, {"y": ONE}, "y tensor"),
        ({"y": torch.ones(20)}, {"y": torch.zeros(20)}, "y that differs by up to 1.0e+00, where the largest"),
        ({"y": torch.ones(20) > 0}, {"y": torch.ones(20) < 0}, "y that differs by up to 1.0e+00"),
        ({"y": ONE[:1]}, {"y": ONE}, "y of the shape (1,) and torch.float64 and not of the shape (2,)"),
        ({"y": None}, {"y": ONE}, "y None and not of the shape"),
        ({"y": ONE}, {"y": None}, "and torch.float64 and not None"),
        ({"y": 1.0}, {"y": 2.0}, "y 1.0 and not 2.0"),
    ):
        assert said in difference(found, right, rtol=1e-9)
    assert difference({"a": None, "b": 1, "y": ONE}, {"y": ONE, "a": None, "b": 1}) == ""
    assert largest(torch.tensor([True])) == largest(torch.tensor([-1.0, torch.inf])) == 1
