"""Which form an instance takes, found by running it: a small copy in float64, compared with ours.

    the copy        the same class and settings, all parameters drawn anew, tables and lists of a few anchors, buckets
                    of 3 anchors; every stratum is there
    chained         the derivative of the third stratum's log-probability by the first value layer is not 0
    least           exp(logits + log theta) for cells without contacts
    the form        the first whose summed log-probability, and gradients of it by u, v, l and every parameter, agree
                    to 1e-9, in training and in evaluation mode

So a copy that differs in anything that shows in a number is not recognised. Nothing of the instance is changed, and no
random numbers of the caller are used up. Every rank finds the same.

Known limits: what a decoder does with sizes (other than windows) or with values of one kind only is not seen.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F).
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_amp.adapters.decoder import AdaptedDecoder
from lightning_amp.adapters.higlue import TABLES, Form, check_parts, dim_of, forms, make_decoder
from lightning_amp.adapters.layout import LISTS, Layout, NotRecognised, columns_list, layout_of, read_layout
from lightning_amp.errors import AmpError
from lightning_amp.parallel.hooks import KINDS

CLOSE = 1e-9
TOTAL = "log-probability"
FAR = f"has another {TOTAL} than any of our forms"
CELLS, WINDOW = 3, 3
MORE_ANCHORS = 11
"""Anchors beyond the number of strata: four buckets at least, the last one cut short."""
Results = dict[str, Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class _Small:
    """A small copy and what it is run on."""

    module: nn.Module
    layout: Layout
    inputs: tuple[Tensor, Tensor, Tensor]
    b: Tensor
    x: Tensor

    def run(self) -> Any:
        u, v, l = self.inputs  # noqa: E741
        return self.module(u, v, self.b, l)


def adapted(module: nn.Module) -> AdaptedDecoder:
    """Our decoder for a foreign one.

    Raises:
        NotRecognised: No form of ours computes what the module does.
    """
    layout = read_layout(module)
    check_parts(module, layout)
    return make_decoder(module, layout, _form_of(module, layout))


def _form_of(module: nn.Module, layout: Layout) -> Form:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            small = _small(module, layout)
            seen, expected = _seen(small), _expected(small)
        except AmpError:
            raise
        except Exception as error:
            raise NotRecognised(f"fails on a small example with {error!r}") from error
        problems = []
        for form in forms(small.module, seen):
            problems.append(_difference(small, form, expected))
            if not problems[-1]:
                return form
    # the form that comes furthest says most
    near = [problem for problem in problems if problem != FAR] or problems
    raise NotRecognised(near[0] if near else "has parts of which none of our forms is made")


def _seen(small: _Small) -> Form:
    """What can be told without trying."""
    given = small.run()
    kind, names = type(given), set(inspect.signature(type(given)).parameters)
    if issubclass(kind, torch.distributions.Bernoulli):
        return Form(kind=kind, chained=_chained(small, given))
    if not (
        issubclass(kind, torch.distributions.NegativeBinomial)
        and {"zi_logits", "total_count", "logits"} <= names
    ):
        raise NotRecognised(
            f"returns {kind.__name__!r}, and not a Bernoulli, or a NegativeBinomial that is made from zi_logits,"
            " total_count and logits"
        )
    return Form(kind=kind, chained=_chained(small, given), least=_least(small))


def _chained(small: _Small, given: Any) -> bool:
    layers: Any = getattr(small.module, "value_layers", ())
    if len(small.layout.columns) < 3 or not len(layers):
        return False
    third = given.log_prob(small.x)[:, slice(*small.layout.columns[2])].sum()
    (grad,) = torch.autograd.grad(third, [layers[0].weight], allow_unused=True)
    return grad is not None and bool(grad.any())


def _least(small: _Small) -> float:
    """What is added to means: all that is left of them in cells without contacts."""
    u, v, l = small.inputs  # noqa: E741
    with torch.no_grad():
        given = small.module(u, v, small.b, 0 * l)
        found = (given.logits + cast(Any, small.module).log_theta[small.b]).exp()
    if not torch.allclose(found, found[:1, :1], rtol=CLOSE, atol=0):
        raise NotRecognised("returns means for cells without contacts that are not alike")
    return float(f"{float(found[0, 0]):.12g}")


def _difference(small: _Small, form: Form, expected: dict[bool, Results]) -> str:
    """Where a form differs from the copy, in training or in evaluation mode; "" if nowhere."""
    u, v, l = small.inputs  # noqa: E741
    try:
        ours = make_decoder(small.module, small.layout, form)
        for training, results in expected.items():
            small.module.train(training)
            total = -ours.nll(u, v, batch=small.b, library=l, x=small.x)
            if not (total - results[TOTAL]).norm() <= CLOSE * results[TOTAL].norm():
                return FAR
            found = _results(small, total)
            for name, value in results.items():
                if not (found[name] - value).norm() <= CLOSE * value.norm():
                    return f"has another {name} than any of our forms"
    except NotRecognised as error:
        return str(error)
    except Exception as error:
        return f"fails in the comparison with {error!r}"
    return ""


def _expected(small: _Small) -> dict[bool, Results]:
    """What the copy computes, by its mode."""
    found = {}
    for training in (True, False):
        small.module.train(training)
        found[training] = _results(small, small.run().log_prob(small.x).sum())
    return found


def _results(small: _Small, total: Tensor) -> Results:
    named = dict(zip(("u", "v", "l"), small.inputs, strict=True)) | dict(small.module.named_parameters())
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    found = {TOTAL: total.detach()}
    for (name, value), grad in zip(named.items(), grads, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(value) if grad is None else grad
    return found


def _small(module: nn.Module, layout: Layout) -> _Small:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, dtype=torch.float64, generator=generator)

    n_strata = len(layout.nodes)
    n_anchors = n_strata + MORE_ANCHORS
    # three or four of the anchors that have a pair at this distance, up to the last one
    nodes = [torch.arange(k % 2, n_anchors - k, 4) for k in range(n_strata)]
    nodes[0] = torch.arange(n_anchors)
    small_layout = layout_of(nodes)
    memo = _substitutes(module, small_layout, draw)
    small = copy.deepcopy(module, memo)
    for layer in getattr(small, "attn_layers", ()):
        layer.window_size = WINDOW
    n_batches, dim = cast(Any, module).scale_lin.shape[0], dim_of(module)
    u, v = (draw(n, dim, size=size).requires_grad_() for n, size in ((CELLS, dim**-0.5), (n_anchors, 1.0)))
    counts = torch.poisson(draw(CELLS, small_layout.n_features).square(), generator=generator)
    l = (counts.sum(1, keepdim=True) + 1).requires_grad_()  # noqa: E741
    with torch.no_grad():
        binary = isinstance(small(u, v, torch.arange(CELLS) % n_batches, l), torch.distributions.Bernoulli)
    x = (counts > 0).double() if binary else counts
    return _Small(small, small_layout, (u, v, l), torch.arange(CELLS) % n_batches, x)


def _substitutes(module: nn.Module, layout: Layout, draw: Any) -> dict[int, Any]:
    """What deepcopy is to take in place of parameters, buffers, lists and hooks."""
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        shape: Sequence[int] = parameter.shape
        if name in TABLES:
            shape = (len(parameter), layout.n_features)
        # of the size that keeps products near 1, and LayerNorm's weights apart from 0
        values = draw(*shape, size=0.5 if len(shape) < 2 or name in TABLES else shape[-1] ** -0.5)
        memo[id(parameter)] = nn.Parameter(
            values + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        )
    for buffer in module.buffers():
        memo[id(buffer)] = (
            buffer.detach().cpu().to(torch.float64 if buffer.is_floating_point() else buffer.dtype)
        )
    columns = [torch.arange(*run) for run in layout.columns]
    for name in LISTS:
        value = getattr(module, name)
        lists = columns if name == columns_list(module) else layout.nodes
        memo[id(value)] = [_like(rows, one) for rows, one in zip(lists, value, strict=True)]
    for child in module.modules():
        memo |= {id(getattr(child, kind)): OrderedDict() for kind in KINDS}
    return memo


def _like(rows: Tensor, example: Any) -> Any:
    """Indices of the type that the decoder has them in."""
    if isinstance(example, Tensor):
        return rows
    return rows.tolist() if isinstance(example, list | tuple) else rows.numpy()
