"""Read the anchors and data columns of a foreign decoder's strata from its two lists of indices.

One of `feature_masks` and `strata_masks` lists anchors, the other columns of the tables. Which is which depends on the
numbers: columns count up from 0 through all strata, one run after the other.

Legend: cell (B), anchor (N), stratum (K), feature (F in all, F_k of stratum k, stratum-major).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lightning_amp.errors import ModelError

LISTS = ("feature_masks", "strata_masks")


class NotRecognised(ModelError):
    """A module that looks like a decoder we know and is none; its text says why, as what follows the module's name."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Layout:
    """The strata of a decoder.

    Attributes:
        columns: First and one past the last column, for every stratum.
        n_anchors: N, as far as the features tell: one past the last anchor that has any.
        listed_in: Name of the decoder's list that holds the columns.
    """

    nodes: tuple[Int[Tensor, " stratum_feature"], ...]
    columns: tuple[tuple[int, int], ...]
    n_anchors: int
    listed_in: str = ""

    @property
    def n_features(self) -> int:
        """F."""
        return self.columns[-1][1]


def layout_of(nodes: Sequence[Tensor], listed_in: str) -> Layout:
    """The layout of strata with these anchors, their columns one run after the other."""
    ends = list(accumulate((len(rows) for rows in nodes), initial=0))
    return Layout(
        nodes=tuple(nodes),
        columns=tuple(pairwise(ends)),
        n_anchors=1 + max(int(rows.max()) for rows in nodes),
        listed_in=listed_in,
    )


def read_layout(decoder: nn.Module) -> Layout:
    """The layout that a foreign decoder's lists say.

    Raises:
        NotRecognised: The lists are missing or of another kind, or neither lists columns.
    """
    found = {name: _indices(name, getattr(decoder, name, None)) for name in LISTS}
    one, other = found.values()
    if [len(rows) for rows in one] != [len(rows) for rows in other]:
        raise NotRecognised("has strata with other numbers of anchors than of columns")
    runs = [name for name, lists in found.items() if _are_runs(lists)]
    if not runs:
        raise NotRecognised(
            f"has columns in neither of {LISTS!r}: those of a stratum must follow those of the stratum"
            " before, from 0 on"
        )
    # where both count up there is one stratum, and both are the same
    columns = "strata_masks" if "strata_masks" in runs else "feature_masks"
    return layout_of(next(lists for name, lists in found.items() if name != columns), columns)


def _are_runs(lists: Sequence[Tensor]) -> bool:
    whole = torch.cat(list(lists))
    return torch.equal(whole, torch.arange(len(whole)))


def _indices(name: str, value: Any) -> list[Tensor]:
    if not isinstance(value, list | tuple) or not value:
        raise NotRecognised(
            f"has {name}={type(value).__name__!r}, and not a list with one list of indices per stratum"
        )
    try:
        lists = [torch.as_tensor(rows).detach().cpu() for rows in value]
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotRecognised(f"has {name} that cannot be read as lists of indices: {error}") from error
    wrong = [k for k, rows in enumerate(lists) if rows.dim() != 1 or not len(rows) or not _counts(rows)]
    if wrong:
        raise NotRecognised(f"has {name} without indices of 0 or more in the strata {wrong!r}")
    return [rows.long() for rows in lists]


def _counts(rows: Tensor) -> bool:
    return not rows.is_floating_point() and rows.dtype != torch.bool and int(rows.min()) >= 0
