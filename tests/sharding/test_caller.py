"""The error of an operator that cannot be computed on parts names a line of the user's module, not a library's."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from lightning_amp.errors import ShardError
from lightning_amp.sharding.registry import shard_error


class Raises:
    def backward(self) -> None:
        raise shard_error(Tensor.backward, [], "of a test")


class Module(pl.LightningModule):
    def backward(self, loss: Any) -> None:  # type: ignore[override]
        # a method of the user's module, whose line is Lightning's
        super().backward(loss)


def test_lines_of_libraries_are_not_named() -> None:
    with pytest.raises(ShardError, match=rf"in 'Module', {re.escape(__file__)}:\d+,"):
        Module().backward(Raises())
