"""Detect the form of a decoder by running a small copy of it (small_copy.py) and comparing it with ours.

    nothing else    its forward changes no attribute, parameter, buffer or child of it, which ours would leave alone
    least           exp(logits + log theta) for cells without contacts
    the form        the first whose summed log-probability, and gradients of it by u, v, l and every parameter,
                    agree to 1e-9 in training and in evaluation; where values are large, those by u, v and l

A form has to be known before there is a plan, and large values come long after the first batch. The real lists,
buckets, buffers and inputs are compared with the first batch (real_size.py). A comparison that fails shows nothing: it
is an error, unless its attention has a setting that ours does not have. Nothing of the instance is changed, and no
random numbers of the caller are used. Every rank finds the same form, for torch's distributions check their values
meanwhile, whatever an import has set.

Known limits: what a decoder does with values that are still larger, or where its own result is not finite, is not seen.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F).
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_amp.adapters.forms.adapted_decoder import AdaptedDecoder
from lightning_amp.adapters.forms.column_layout import Layout, NotRecognised
from lightning_amp.adapters.forms.higlue import Form, forms, make_decoder, read_parts
from lightning_amp.adapters.forms.multires import make_multires, read_bands, resembles_multires
from lightning_amp.adapters.recognise.module_snapshot import Marks, hooked
from lightning_amp.adapters.recognise.small_copy import (
    LARGE,
    NEAR_ONE,
    Sizes,
    Small,
    settings_problem,
    small_copy,
    small_multires,
)
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.techniques.checks.likelihood import checking_values
from lightning_amp.techniques.checks.same_function import close, failure

CLOSE = 1e-9
TOTAL = "log-probability"
FAR = f"has another {TOTAL} than any of our forms"
SHOWN = 3


class _Family(NamedTuple):
    """How decoders of one kind are read, copied small, and made of our parts."""

    read: Callable[[nn.Module], Layout]
    small: Callable[[nn.Module, Layout, Sizes], Small]
    forms: Callable[[nn.Module, Form], Iterator[Form]]
    make: Callable[[nn.Module, Layout, Form], AdaptedDecoder]


ONE_RESOLUTION = _Family(read_parts, small_copy, forms, make_decoder)
SEVERAL = _Family(read_bands, small_multires, lambda _, seen: iter([seen]), make_multires)


class _Case(NamedTuple):
    """What a form of ours has to compute too."""

    small: Small
    training: bool
    x: Tensor
    expected: dict[str, Tensor]


@checking_values(True)
def adapted(module: nn.Module) -> AdaptedDecoder:
    """Our decoder for a foreign one.

    Raises:
        NotRecognised: No form of ours computes what the module does.
        ModelError: The comparison fails, so that nothing is known.
    """
    try:
        # a library's warning says nothing of the module, also where warnings are errors
        with warnings.catch_warnings(action="ignore"):
            return _adapted(module)
    except AmpError:
        raise
    except Exception as error:
        if problem := settings_problem(module):
            raise NotRecognised(f"fails in the comparison with {failure(error)}{problem}") from error
        raise ModelError(
            f"the decoder {type(module).__name__!r} has the parts of HiGLUE's, and fails where it is compared with"
            f" ours, with {failure(error)}: repair that, or name techniques that change no decoder, such as"
            " strategies='S1', under which it is trained as any other module"
        ) from error


def _adapted(module: nn.Module) -> AdaptedDecoder:
    family = SEVERAL if resembles_multires(module) else ONE_RESOLUTION
    layout = family.read(module)
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        raise NotRecognised("has a forward that is set on the instance, or was compiled")
    try:
        inspect.signature(module.forward).bind("u", "v", "b", "l")
    except TypeError as error:
        raise NotRecognised(f"has a forward that does not take u, v, b and l: {error}") from error
    decoder = family.make(module, layout, _form_of(family, module, layout))
    names = hooked(module, decoder)
    if names:
        raise NotRecognised(f"has hooks on modules of it, {names[:SHOWN]!r}, which would not run")
    return decoder


def _form_of(family: _Family, module: nn.Module, layout: Layout) -> Form:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        small = family.small(module, layout, NEAR_ONE)
        marks = Marks(small.module)
        seen = _seen(small)
        cases = [_case(small, seen, training=training) for training in (True, False)]
        names = marks.changed(small.module)
        if names:
            raise NotRecognised(f"changes its attributes {names[:SHOWN]!r} in forward, which ours would not")
        for sizes in LARGE:
            # the copy's distribution may refuse what comes of large values
            with suppress(ValueError):
                cases.append(_case(family.small(module, layout, sizes), seen))
        problems = []
        for form in family.forms(small.module, seen):
            problems.append(_problem(family, cases, form))
            if not problems[-1]:
                return form
    # the form that comes furthest says most
    near = [problem for problem in problems if problem != FAR] or problems
    found = near[0] if near else "has parts of which none of our forms is made"
    raise NotRecognised(found + settings_problem(module))


def _seen(small: Small) -> Form:
    """What is known without a trial."""
    given = small.run()
    kind = _kind_of(given)
    binarized = issubclass(kind, torch.distributions.Bernoulli)
    return Form(kind=kind, least=0.0 if binarized else _least(small))


def _kind_of(given: object) -> type:
    """The class of what a decoder returns."""
    kind = type(given)
    counts = issubclass(kind, torch.distributions.NegativeBinomial)
    if issubclass(kind, torch.distributions.Bernoulli) or (
        counts and {"zi_logits", "total_count", "logits"} <= set(inspect.signature(kind).parameters)
    ):
        return kind
    raise NotRecognised(
        f"returns {kind.__name__!r}, and not a Bernoulli, or a NegativeBinomial that is made from zi_logits,"
        " total_count and logits"
    )


def _least(small: Small) -> float:
    """What is added to means: all that is left of them in cells without contacts."""
    u, v, l = small.inputs  # noqa: E741
    with torch.no_grad():
        given = small.module(u, v, small.b, 0 * l)
        means = (given.logits + cast(Any, small.module).log_theta[small.b]).exp()
    if not torch.allclose(means, means[:1, :1], rtol=CLOSE, atol=0):
        raise NotRecognised("returns different means for cells without contacts")
    return float(f"{float(means[0, 0]):.12g}")


def _case(small: Small, seen: Form, *, training: bool = True) -> _Case:
    x = small.x(binarized=seen.binarized)
    total = small.run(training=training).log_prob(x).sum()
    return _Case(small, training, x, dict(_results(small, total)))


def _problem(family: _Family, cases: Sequence[_Case], form: Form) -> str:
    """Where a form differs from the copies first; "" if nowhere."""
    try:
        for small, training, x, expected in cases:
            sizes, (u, v, l) = small.sizes, small.inputs  # noqa: E741
            ours = family.make(small.module.train(training), small.layout, form)
            total = -ours.nll(u, v, batch=small.b, library=ours.library(u, l), x=x)
            for name, found in _results(small, total):
                unknown = not expected[name].isfinite().all()
                if sizes.large and unknown:
                    continue
                if unknown or not close(found, expected[name], rtol=CLOSE):
                    return f"has another {name} than any of our forms{sizes.where}"
    except NotRecognised as error:
        return str(error)
    return ""


def _results(small: Small, total: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The log-probability, and its gradients by name."""
    yield TOTAL, total.detach()
    named = dict(zip(("u", "v", "l"), small.inputs, strict=True))
    if not small.sizes.large:
        named |= dict(small.module.named_parameters())
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for (name, value), grad in zip(named.items(), grads, strict=True):
        yield f"gradient of {name}", torch.zeros_like(value) if grad is None else grad
