"""Run a block of another rank on zeros, only to learn the shapes of its result.

This is for blocks whose operators need values, such as experts: values decide which rows each expert gets, and not the
shape of the result.

Values of this rank are copied, and placeholders and parameters of other ranks become zeros, a parameter of one number
for all entries. The result is placeholders again, so that none of its values is read, and its digest is compared with
that of the sender as usual. Python numbers among its results and new attributes are refused, for they may depend on
values.

Cost: in the first step, one forward pass without gradients of each such block; its temporary tensors are not counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import has_no_values, tree_leaves, tree_map, unseen
from lightning_amp.errors import InstallError
from lightning_amp.random_streams import isolated_random_streams
from lightning_amp.techniques.pipeline.run.messages import packed_draws


def zeros_for_placeholders(values: Any, device: torch.device) -> Any:
    """Return nested values with zeros in place of placeholders, and with copies of other tensors."""

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.zeros(value.shape, dtype=value.dtype, device=device) if has_no_values(value) else value.clone()

    with unseen():
        return tree_map(stand_in, values)


def run_on_zeros(block: nn.Module, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, bool]:
    """Return the result of a block, of values without meaning, and whether it draws random numbers."""
    with unseen(), torch.no_grad(), isolated_random_streams(), _zeros_for_absent(block, device):
        before = packed_draws()
        made = type(block).forward(block, *args, **kwargs)
        return made, not torch.equal(before, packed_draws())


def refuse_numbers(block: nn.Module, values: Any) -> None:
    """Raise an InstallError for numbers among the results and new attributes of a block that has run on zeros."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, int | float | complex):
            raise InstallError(
                f"pipeline: a block of another rank, a {type(block).__name__!r}, returns or keeps the number {leaf!r},"
                " which may depend on values of that rank: let it be a tensor, or leave 'pipeline' out"
            )


@contextmanager
def _zeros_for_absent(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Replace parameters of other ranks, and buffers by copies, while the context is entered."""
    tables: list[dict[str, Any]] = [t for part in block.modules() for t in (part._parameters, part._buffers)]
    replaced: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    for table in tables:
        for name, value in table.items():
            if isinstance(value, nn.Parameter) and has_no_values(value):
                zeros = torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)
                replaced.append((table, name, value, nn.Parameter(zeros, requires_grad=False)))
            elif value is not None and not isinstance(value, nn.Parameter):
                replaced.append((table, name, value, value.clone()))
    for table, name, _, stand_in in replaced:
        table[name] = stand_in
    try:
        yield
    finally:
        for table, name, value, stand_in in replaced:
            # not what the block has set itself
            if table.get(name) is stand_in:
                table[name] = value
