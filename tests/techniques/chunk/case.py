"""A block captured once in float64, to be compared with itself with regions in chunks."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.graph.capture import Capture
from lightning_amp.graph.captures import Captures
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.region import Region
from lightning_amp.techniques.chunk.run.lower import lower, table_of
from tests.graph.calls import difference
from tests.techniques.chunk.regions.tables import find_regions
from tests.techniques.chunk.small_blocks import BLOCKS


class Case:
    """A block in float64 and one call of it, captured once."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.block, self.kwargs = copy.deepcopy(block).double(), kwargs or {}
        self.args = tuple(
            a.detach().double().requires_grad_(a.requires_grad)
            if isinstance(a, Tensor) and a.is_floating_point()
            else a
            for a in args
        )

    @cached_property
    def capture(self) -> Capture:
        found = Captures().of(self.block, self.args, self.kwargs)
        assert found.reason == ""
        return found

    @cached_property
    def table(self) -> Table:
        return table_of(self.capture)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        return find_regions(self.table)

    def error(self, *regions: Region) -> str:
        """What is otherwise with regions in chunks; "" if nothing."""
        form = lower(self.capture, self.table, regions)
        return difference(self.block, form, self.args, self.kwargs)

    def where(self, op: str, dim: int | None = None) -> Region:
        """The longest region with an operator, cut or summed."""
        rows = [i for i, row in enumerate(self.table.rows) if row.op == f"aten.{op}"]
        assert rows, sorted({row.op for row in self.table.rows})
        fitting = [
            r for r in self.regions for i in rows if i in r.inside(self.table) and (dim is None or r.dims.get(i) == dim)
        ]
        return max(fitting, key=lambda r: len(r.inside(self.table)))


def case(name: str) -> Case:
    torch.manual_seed(0)
    make, args = BLOCKS[name]
    return Case(make(), args())


def numbers(region: Region) -> Iterator[Region]:
    """The region in 2 and 3 chunks, in one per position, and in a number that leaves a smaller chunk."""
    uneven = next((n for n in range(2, region.units) if region.units % n), 2)
    for n in sorted({min(k, region.units) for k in (2, 3, uneven, region.units)}):
        yield replace(region, n_chunks=n)


def every(regions: Sequence[Region]) -> list[Region]:
    return [some for region in regions for some in numbers(region)]


def some_of(regions: Sequence[Region]) -> list[Region]:
    """In all numbers of chunks the longest region of every last row and dim, which uses every rule that others use.

    Of the others every fifth in one number.
    """
    longest = {(r.last, r.dims.get(r.last)): i for i, r in enumerate(regions)}
    others = [r for i, r in enumerate(regions) if i not in longest.values()][::5]
    return every([regions[i] for i in longest.values()]) + [
        [*numbers(r)][i % len([*numbers(r)])] for i, r in enumerate(others)
    ]


def which(names: Iterable[str], *large: str) -> list[Any]:
    """Of every block all regions; of large ones some, and all of them before a release."""
    more = [pytest.param(name, every, marks=[pytest.mark.exhaustive, pytest.mark.release]) for name in large]
    return [(name, some_of if name in large else every) for name in names] + more
