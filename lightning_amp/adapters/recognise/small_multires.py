"""A small copy of a decoder of several resolutions: as small_copy.py has it, with fewer anchors of every resolution.

Columns are missing where the decoder has not all.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F), resolution (R).
"""

import copy
from typing import Any

import torch
from torch import nn

from lightning_amp.adapters.forms.column_layout import Layout
from lightning_amp.adapters.forms.multires import bands, read_bands
from lightning_amp.adapters.recognise.small_copy import WINDOW, Sizes, Small, draw, set_window


def small_multires(module: Any, layout: Layout, sizes: Sizes) -> Small:
    """A small copy of a module, which is left as it is."""
    memo: dict[int, Any] = {}
    specs: list[Any] = []
    anchors, features = 0, 0
    for i, (spec, band) in enumerate(zip(module.res_specs, bands(module), strict=True)):
        own = copy.copy(spec)
        n = sizes.n_anchors(spec.n_strata + sizes.more + i * WINDOW)
        whole = torch.ones(spec.n_strata, n, dtype=torch.bool)
        if bool((band < 0).any()):
            whole[:, 2] = False
            whole &= torch.arange(n) < n - torch.arange(spec.n_strata)[:, None]
        columns = torch.arange(features, features + int(whole.sum()))
        places = torch.full(whole.shape, -1)
        places[whole] = columns
        own.n_anchors, own.anchor_offset = n, anchors
        own.band_idx, own.feat_idx = places.flatten().numpy(), columns.numpy()
        memo[id(getattr(module, f"band_idx_{i}"))] = places
        feat_idx = getattr(module, f"feat_idx_{i}", None)
        memo |= {} if feat_idx is None else {id(feat_idx): columns}
        specs.append(own)
        anchors, features = anchors + n, features + len(columns)
    memo[id(module.res_specs)] = specs
    small = _drawn(module, memo, sizes, n_anchors=anchors, n_features=features)
    set_window(small.module)
    return small


def drawn_multires(module: Any, layout: Layout, sizes: Sizes) -> Small:
    """A copy of a module with its own anchors and columns, whose parameters are drawn anew."""
    n_anchors = sum(spec.n_anchors for spec in module.res_specs)
    return _drawn(module, {}, sizes, n_anchors=n_anchors, n_features=layout.n_features)


def _drawn(module: nn.Module, memo: dict[int, Any], sizes: Sizes, **numbers: int) -> Small:
    copied, *values = draw(module, memo, sizes, **numbers)
    return Small(copied, read_bands(copied), sizes, *values)
