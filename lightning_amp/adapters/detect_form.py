"""Find which of our decoders computes the same as a user's HiGLUE decoder, by running a small float64 copy of both.

    side effects    `forward` must not change an attribute, parameter, buffer or child of the decoder
    least           constant in the means: exp(logits + log theta) for cells without contacts
    form            the first form whose summed log-probability and gradients by u, v, l and every parameter agree
                    to 1e-9, in training and evaluation mode; for large values, gradients by u, v and l only
    copy            same class and settings; parameters drawn anew in float64; tables and lists of a few anchors;
                    buckets of 3 anchors, the last one full or one short; no hooks; all strata

Planning requires the form, before the first batch. The real lists, buckets, buffers and inputs are compared on the
first batch (first_batch.py). If the comparison raises, that is an error, unless the attention has a setting that ours
lacks. The instance and the caller's random state do not change. Distributions validate their values during the
comparison, so that every rank finds the same form.

Known limits: differences at larger values, or where the decoder's own result is not finite, are not detected.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F), resolution (R).
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_amp.adapters.first_batch import Marks, hooked, no_hooks
from lightning_amp.adapters.forms.adapted_decoder import LISTS, AdaptedDecoder, Layout, NotDetected, layout_of
from lightning_amp.adapters.forms.higlue import TABLES, Form, dim_of, forms, make_decoder, read_parts
from lightning_amp.adapters.forms.multires import bands, make_multires, read_bands, resembles_multires
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.techniques.checks.likelihood import checking_values
from lightning_amp.techniques.checks.same_function import close, failure

OURS = {
    "causal": False,
    "look_backward": 1,
    "look_forward": 1,
    "exact_windowsize": False,
    "autopad": True,
    "shared_qk": True,
    "use_xpos": False,
    "scale": None,
}


def attention_layers(module: nn.Module) -> list[nn.Module]:
    """Attention layers of a decoder, of all resolutions."""
    several: Any = getattr(module, "attn_layers_by_res", None) or ()
    return [*getattr(module, "attn_layers", ()), *(layer for layers in several for layer in layers)]


def settings_problem(module: nn.Module) -> str:
    """Describe how a decoder's attention settings differ from ours, as the end of a message; "" if they do not."""
    found: dict[str, None] = {}
    for layer in [] if getattr(module, "use_attn", True) is False else attention_layers(module):
        for name, ours in OURS.items():
            value = getattr(layer, name, ours)
            if value != ours:
                found[f"{name}={value!r} where ours has {ours!r}"] = None
        dropout = getattr(getattr(layer, "dropout", None), "p", 0)
        if dropout:
            found[f"dropout={dropout!r} where ours has none"] = None
        if getattr(layer, "rel_pos", layer) is None:
            found["no rotary positions (`dim`, use_rotary_pos_emb) where ours has them"] = None
    return f": its attention has {', '.join(found)}" if found else ""


WINDOW = 3
CELLS = 3
MORE = 11
"""Least number of anchors in addition to the number of strata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Factors of the copy's values, and offsets of two of its tables."""

    where: str = ""  # in words, for a message
    # large values: gradients of parameters and results that are not finite are not compared
    large: bool = False
    short: int = 1  # missing anchors in the last bucket
    u: float = 1.0
    v: float = 1.0
    counts: float = 1.0
    layers: float = 1.0
    log_theta: float = 0.0
    zi_logits: float = 0.0

    def n_anchors(self, at_least: int) -> int:
        """Number of anchors, such that the last bucket lacks `short` of them."""
        return at_least + -(at_least + self.short) % WINDOW


NEAR_ONE = Scales()
LARGE = (
    Scales(where=" where u is large", large=True, short=0, u=30, counts=30),
    # additional zeros are so rare here that another small number in their place shows
    Scales(where=" where v and weights are large", large=True, v=30, counts=30, layers=5, log_theta=2, zi_logits=-30),
)


@dataclass(frozen=True, eq=False, slots=True)
class Small:
    """A small copy of a decoder and its inputs."""

    module: nn.Module
    layout: Layout
    sizes: Scales
    inputs: tuple[Tensor, Tensor, Tensor]
    b: Tensor
    counts: Tensor

    def run(self, *, training: bool = True) -> Any:
        """Run the copy."""
        u, v, l = self.inputs  # noqa: E741
        return self.module.train(training)(u, v, self.b, l)


def small_copy(module: nn.Module, layout: Layout, sizes: Scales) -> Small:
    """Make a small copy with the decoder's layout; the decoder does not change."""
    n_strata = len(layout.nodes)
    n_anchors = sizes.n_anchors(n_strata + MORE)
    # three or four of the anchors that have a pair at this distance, up to the last one
    nodes = [torch.arange(n_anchors), *(torch.arange(k % 2, n_anchors - k, 4) for k in range(1, n_strata))]
    few = layout_of(nodes, layout.listed_in)
    columns = [torch.arange(*run) for run in few.columns]
    memo: dict[int, Any] = {}
    # the type (list, array, tensor) is kept, because indexing depends on it
    for name in LISTS:
        value = getattr(module, name)
        lists = columns if name == few.listed_in else few.nodes
        memo[id(value)] = [_like(rows, one) for rows, one in zip(lists, value, strict=True)]
    # deepcopy takes the short lists in place of the real ones, which may have millions of entries
    copied, *values = _drawn(module, memo, sizes, n_anchors=n_anchors, n_features=few.n_features)
    return Small(copied, few, sizes, *values)


def small_multires(module: Any, _: Layout, sizes: Scales) -> Small:
    """Make a small copy of a decoder with several resolutions; the decoder does not change."""
    memo: dict[int, Any] = {}
    specs: list[Any] = []
    anchors, features = 0, 0
    for i, (spec, band) in enumerate(zip(module.res_specs, bands(module), strict=True)):
        own = copy.copy(spec)
        n = sizes.n_anchors(spec.n_strata + MORE + i * WINDOW)
        whole = torch.ones(spec.n_strata, n, dtype=torch.bool)
        if bool((band < 0).any()):
            # gaps where the real columns have some: a bin that was left out, and pairs beyond the end
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
    copied, *values = _drawn(module, memo, sizes, n_anchors=anchors, n_features=features)
    return Small(copied, read_bands(copied), sizes, *values)


def _drawn(
    module: nn.Module, memo: dict[int, Any], sizes: Scales, *, n_anchors: int, n_features: int
) -> tuple[Any, ...]:
    """Return a copy with new parameters and the lists of `memo`, and its inputs: (u, v, l), b and counts."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    drawn: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        shape = (len(parameter), n_features) if name in TABLES else parameter.shape
        drawn[id(parameter)] = nn.Parameter(_scaled(normal(*shape), name, sizes))
    for buffer in module.buffers():
        dtype = torch.float64 if buffer.is_floating_point() else buffer.dtype
        drawn[id(buffer)] = buffer.detach().cpu().to(dtype, copy=True)
    copied = copy.deepcopy(module, no_hooks(module) | drawn | memo)
    for layer in attention_layers(copied):
        cast(Any, layer).window_size = WINDOW
    dim, resolutions = dim_of(module), len(getattr(module, "res_specs", "1"))
    u = (sizes.u * dim**-0.5 * normal(CELLS, dim)).requires_grad_()
    v = (sizes.v * normal(n_anchors, dim)).requires_grad_()
    # many zeros, as contacts have
    counts = sizes.counts * torch.poisson(normal(CELLS, n_features).square(), generator=generator)
    l = (counts.sum(1, keepdim=True) * torch.arange(1, resolutions + 1) + 1).requires_grad_()  # noqa: E741
    b = torch.arange(CELLS) % len(cast(Any, module).scale_lin)
    return copied, (u, v, l), b, counts


def _scaled(values: Tensor, name: str, sizes: Scales) -> Tensor:
    """Scale values so that products are near 1, and shift LayerNorm weights away from 0."""
    if name in TABLES:
        return 0.5 * values + {"log_theta": sizes.log_theta, "zi_logits": sizes.zi_logits}.get(name, 0.0)
    if values.dim() < 2:
        return 0.5 * values + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return sizes.layers * values / math.sqrt(values.shape[-1])


def _like(rows: Tensor, example: Any) -> Any:
    """Convert indices to the type of `example`."""
    if isinstance(example, Tensor):
        return rows
    return rows.tolist() if isinstance(example, list | tuple) else rows.numpy()


CLOSE = 1e-9
TOTAL = "log-probability"
FAR = f"has another {TOTAL} than any of our forms"
SHOWN = 3


class _Family(NamedTuple):
    """Functions that read, copy and rebuild one kind of decoder."""

    read: Callable[[nn.Module], Layout]
    small: Callable[[nn.Module, Layout, Scales], Small]
    forms: Callable[[nn.Module, Form], Iterator[Form]]
    make: Callable[[nn.Module, Layout, Form], AdaptedDecoder]


ONE_RESOLUTION = _Family(read_parts, small_copy, forms, make_decoder)
SEVERAL = _Family(read_bands, small_multires, lambda _, seen: iter([seen]), make_multires)


_Case = tuple[Small, bool, Tensor, dict[str, Tensor]]
"""Small copy, training mode, counts, and the expected results by name."""


@checking_values(True)
def adapted(module: nn.Module) -> AdaptedDecoder:
    """Return our decoder that computes the same as `module`; raises NotDetected if there is none."""
    try:
        # warnings of libraries are ignored, also where the user turns warnings into errors
        with warnings.catch_warnings(action="ignore"):
            family = SEVERAL if resembles_multires(module) else ONE_RESOLUTION
            layout = family.read(module)
            if "forward" in vars(module) or module._compiled_call_impl is not None:
                raise NotDetected("has a forward that is set on the instance, or was compiled")
            try:
                inspect.signature(module.forward).bind("u", "v", "b", "l")
            except TypeError as error:
                raise NotDetected(f"has a forward that does not take u, v, b and l: {error}") from error
            decoder = family.make(module, layout, _form_of(family, module, layout))
            if names := hooked(module, decoder):
                raise NotDetected(f"has hooks on modules of it, {names[:SHOWN]!r}, which would not run")
            return decoder
    except AmpError:
        raise
    except Exception as error:
        if problem := settings_problem(module):
            raise NotDetected(f"fails in the comparison with {failure(error)}{problem}") from error
        raise ModelError(
            f"the decoder {type(module).__name__!r} has the parts of HiGLUE's, and fails where it is compared with"
            f" ours, with {failure(error)}: repair that, or name techniques that change no decoder, such as"
            " strategies='S1', under which it is trained as any other module"
        ) from error


def _form_of(family: _Family, module: nn.Module, layout: Layout) -> Form:
    # the copy is on the CPU: only the CPU generator is used
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        small = family.small(module, layout, NEAR_ONE)
        marks = Marks(small.module)
        kind = type(small.run())
        needed = {"zi_logits", "total_count", "logits"}
        counts = issubclass(kind, torch.distributions.NegativeBinomial)
        counts = counts and needed <= set(inspect.signature(kind).parameters)
        if not counts and not issubclass(kind, torch.distributions.Bernoulli):
            raise NotDetected(
                f"returns {kind.__name__!r}, and not a Bernoulli, or a NegativeBinomial that is made from zi_logits,"
                " total_count and logits"
            )
        binarized = issubclass(kind, torch.distributions.Bernoulli)
        seen = Form(kind=kind, least=0.0 if binarized else _least(small))
        cases = [_case(small, seen, training=training) for training in (True, False)]
        names = marks.changed(small.module)
        if names:
            raise NotDetected(f"changes its attributes {names[:SHOWN]!r} in forward, which ours would not")
        for sizes in LARGE:
            # the copy's distribution may raise for large values
            with suppress(ValueError):
                cases.append(_case(family.small(module, layout, sizes), seen))
        problems = []
        for form in family.forms(small.module, seen):
            problems.append(_why_other(family, cases, form))
            if not problems[-1]:
                return form
    # a form whose log-probability agrees gives the more helpful message
    near = [problem for problem in problems if problem != FAR] or problems
    found = near[0] if near else "has parts that match none of our forms"
    raise NotDetected(found + settings_problem(module))


def _least(small: Small) -> float:
    """Return the constant that is added to the means; read from cells without contacts."""
    u, v, l = small.inputs  # noqa: E741
    with torch.no_grad():
        given = small.module(u, v, small.b, 0 * l)
        means = (given.logits + cast(Any, small.module).log_theta[small.b]).exp()
    if not torch.allclose(means, means[:1, :1], rtol=CLOSE, atol=0):
        raise NotDetected("returns different means for cells without contacts")
    # rounded: exp and log change the last digits
    return float(f"{float(means[0, 0]):.12g}")


def _case(small: Small, seen: Form, *, training: bool = True) -> _Case:
    # a Bernoulli decoder requires binary data
    x = (small.counts > 0).double() if seen.binarized else small.counts
    total = small.run(training=training).log_prob(x).sum()
    return small, training, x, dict(_results(small, total))


def _why_other(family: _Family, cases: Sequence[_Case], form: Form) -> str:
    """Describe the first difference between a form and the copies; "" if there is none."""
    try:
        for small, training, x, expected in cases:
            sizes, (u, v, l) = small.sizes, small.inputs  # noqa: E741
            ours = family.make(small.module.train(training), small.layout, form)
            total = -ours.nll(u, v, batch=small.b, library=ours.library(u, l), x=x)
            for name, found in _results(small, total):
                # large values may overflow in the module too, where nothing can be compared
                unknown = not expected[name].isfinite().all()
                if sizes.large and unknown:
                    continue
                if unknown or not close(found, expected[name], rtol=CLOSE):
                    return f"has another {name} than any of our forms{sizes.where}"
    except NotDetected as error:
        return str(error)
    return ""


def _results(small: Small, total: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield TOTAL, total.detach()
    named = dict(zip(("u", "v", "l"), small.inputs, strict=True))
    if not small.sizes.large:
        named |= dict(small.module.named_parameters())
    # no gradient counts as zero: the other decoder may return zeros for the same input
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for (name, value), grad in zip(named.items(), grads, strict=True):
        yield f"gradient of {name}", torch.zeros_like(value) if grad is None else grad
