"""Whether ours computes what a decoder of several resolutions does, found by running small copies of it.

    the copy    the same class and settings, all parameters drawn anew in float64, fewer anchors, buckets of 3 anchors,
                every stratum of every resolution, columns missing where the decoder has not all
    sizes       two, so that the last bucket of a resolution is cut short by one anchor and by two
    run         in training and in evaluation mode, with one library size per resolution, and with a subset of anchors
    large       where u, or v and weights, are large: as find_form.py has it

Value and all gradients agree to 1e-9, or the decoder is not taken for ours. Nothing of it is changed.
Known limits: those of find_form.py.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F), resolution (R).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_amp.adapters.forms.column_layout import NotRecognised
from lightning_amp.adapters.forms.higlue import TABLES, Form
from lightning_amp.adapters.forms.multires import MultiResDecoder, bands, dim_of, make_multires, read_bands
from lightning_amp.adapters.recognise.find_form import (
    CLOSE,
    check_hooks,
    check_unchanged,
    kind_of,
    least_of,
)
from lightning_amp.adapters.recognise.module_attributes import marks
from lightning_amp.adapters.recognise.small_copy import LARGE, NEAR_ONE, Sizes, no_hooks, parameter_values
from lightning_amp.errors import AmpError

CELLS, WINDOW = 3, 3
MORE_ANCHORS = (7, 8)
DRAWN = 5
"""Anchors of a resolution in a subset."""


@dataclass(frozen=True, eq=False, slots=True)
class _Small:
    """A small copy, what it is called with, and counts."""

    module: Any
    u: Tensor
    v: Tensor
    l: Tensor  # noqa: E741
    b: Tensor
    x: Tensor
    where: str


def adapted_multires(module: nn.Module) -> MultiResDecoder:
    """Our decoder for a foreign one of several resolutions.

    Raises:
        NotRecognised: Ours does not compute what the module does.
    """
    layout = read_bands(module)
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        raise NotRecognised("has a forward of its own on the instance, or was compiled")
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        form = _form_of(module)
    decoder = make_multires(module, layout, form)
    check_hooks(module, decoder)
    return decoder


def _form_of(module: nn.Module) -> Form:
    try:
        first = _small(module, more=MORE_ANCHORS[0])
        before = marks(first.module)
        form = _seen(first)
        cases = [first, *(_small(module, more=more) for more in MORE_ANCHORS[1:])]
        expected = [_results(case.module, case, mode) for case in cases for mode in _modes(case)]
    except AmpError:
        raise
    except Exception as error:
        raise NotRecognised(f"fails on a small example with {error!r}") from error
    check_unchanged(before, first.module)
    found = [_ours(case, form, mode) for case in cases for mode in _modes(case)]
    _compare(found, expected, "")
    for sizes in LARGE:
        large = _small(module, more=MORE_ANCHORS[0], sizes=sizes)
        try:
            truth = _results(large.module, large, "training")
        except Exception:
            continue
        if all(value.isfinite().all() for value in truth.values()):
            _compare([_ours(large, form, "training")], [truth], large.where)
    return form


def _small(module: Any, *, more: int, sizes: Sizes = NEAR_ONE) -> _Small:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, dtype=torch.float64, generator=generator)

    memo, n_anchors, n_features = _specs(module, more)
    for name, parameter in module.named_parameters():
        shape = (len(parameter), n_features) if name in TABLES else parameter.shape
        memo[id(parameter)] = nn.Parameter(parameter_values(name, shape, draw, sizes))
    for buffer in module.buffers():
        if buffer.is_floating_point():
            memo[id(buffer)] = buffer.detach().cpu().double()
    small = copy.deepcopy(module, memo | no_hooks(module))
    for layers in getattr(small, "attn_layers_by_res", None) or ():
        for layer in layers:
            layer.window_size = WINDOW
    dim, n = dim_of(module), len(small.res_specs)
    u = draw(CELLS, dim, size=sizes.u * dim**-0.5).requires_grad_()
    v = draw(n_anchors, dim, size=sizes.v).requires_grad_()
    x = sizes.counts * torch.poisson(draw(CELLS, n_features).square(), generator=generator)
    l = (5 + 10 * draw(CELLS, n).square()).requires_grad_()  # noqa: E741
    b = torch.arange(CELLS) % len(module.scale_lin)
    return _Small(small, u, v, l, b, x, sizes.where)


def _specs(module: Any, more: int) -> tuple[dict[int, Any], int, int]:
    """What deepcopy is to take in place of resolutions and their columns; anchors and features in all."""
    memo: dict[int, Any] = {}
    specs, anchors, features = [], 0, 0
    for i, (spec, band) in enumerate(zip(module.res_specs, bands(module), strict=True)):
        own = copy.copy(spec)
        n = spec.n_strata + more + (i if (spec.n_strata + more + i) % WINDOW else i + 1)
        whole = torch.ones(spec.n_strata, n, dtype=torch.bool)
        if bool((band < 0).any()):
            whole[:, 2] = False
            whole &= torch.arange(n) < n - torch.arange(spec.n_strata)[:, None]
        places = torch.full(whole.shape, -1)
        places[whole] = torch.arange(features, features + int(whole.sum()))
        own.n_anchors, own.anchor_offset = n, anchors
        own.band_idx, own.feat_idx = (
            places.flatten().numpy(),
            np.arange(features, features + int(whole.sum())),
        )
        memo[id(getattr(module, f"band_idx_{i}"))] = places
        feat_idx = getattr(module, f"feat_idx_{i}", None)
        memo |= {} if feat_idx is None else {id(feat_idx): torch.from_numpy(own.feat_idx)}
        specs.append(own)
        anchors, features = anchors + n, features + int(whole.sum())
    memo[id(module.res_specs)] = specs
    return memo, anchors, features


def _modes(case: _Small) -> Iterator[str]:
    yield from ("training", "evaluation")
    if hasattr(case.module, "sample_feature_subset"):
        yield "subset"


def _seen(small: _Small) -> Form:
    with torch.no_grad():
        form = Form(kind=kind_of(small.module(small.u, small.v, small.b, small.l)))
        if form.binarized:
            return form
        given = small.module(small.u, small.v, small.b, 0 * small.l)
        least = least_of((given.logits + small.module.log_theta[small.b]).exp())
    return Form(kind=form.kind, least=least)


def _subset(small: _Small) -> Any:
    known, small.module.anchor_subsample = small.module.anchor_subsample, DRAWN
    torch.manual_seed(0)
    subset = small.module.sample_feature_subset()
    small.module.anchor_subsample = known
    return subset


def _results(module: Any, small: _Small, mode: str) -> dict[str, Tensor]:
    module.train(mode != "evaluation")
    options, x = {}, small.x
    if mode == "subset":
        options = {"subset": _subset(small)}
        x = x[:, options["subset"].cols]
    given = module(small.u, small.v, small.b, small.l, **options)
    x = (x > 0).double() if issubclass(type(given), torch.distributions.Bernoulli) else x
    return _with_gradients(given.log_prob(x).sum(), small)


def _ours(small: _Small, form: Form, mode: str) -> dict[str, Tensor]:
    decoder, x = make_multires(small.module, read_bands(small.module), form), small.x
    small.module.train(mode != "evaluation")
    if mode == "subset":
        subset = _subset(small)
        decoder, x = decoder.among(subset), x[:, subset.cols]
    x = (x > 0).double() if form.binarized else x
    library = decoder.library(small.u, small.l)
    return _with_gradients(-decoder.nll(small.u, small.v, batch=small.b, library=library, x=x), small)


def _with_gradients(total: Tensor, small: _Small) -> dict[str, Tensor]:
    named = {"u": small.u, "v": small.v, "l": small.l}
    if not small.where:
        named |= dict(small.module.named_parameters())
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    found = {"log-probability": total.detach()}
    for (name, value), grad in zip(named.items(), grads, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(value) if grad is None else grad
    return found


def _compare(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], where: str) -> None:
    for ours, truth in zip(found, expected, strict=True):
        for name, value in truth.items():
            if not (ours[name] - value).norm() <= CLOSE * value.norm():
                raise NotRecognised(f"has another {name} than ours{where}")
