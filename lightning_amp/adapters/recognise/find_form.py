"""Which form an instance takes, found by running a small copy of it (small_copy.py) and comparing it with ours.

    nothing else    its forward changes no attribute, parameter, buffer or child of it, which ours would leave alone
    chained         the derivative of the third stratum's log-probability by the first value layer is not 0
    least           exp(logits + log theta) for cells without contacts
    the form        the first whose summed log-probability, and gradients of it by u, v, l and every parameter, agree
                    to 1e-9 for few and for more cells and anchors, in training, in evaluation and of a subset of
                    anchors; where values are large, those by u, v and l
    the real size   that form agrees for two cells with the real lists, buckets, buffers and numbers (real_size.py)

So a copy that differs in anything that shows in a number is not recognised. A comparison that fails shows nothing: it
is an error, unless its attention has a setting that ours has not. Nothing of the instance is changed, and no random
numbers of the caller are used up. Every rank finds the same, for torch's distributions check their values meanwhile,
whatever an import has set.

Known limits: what a decoder does with a v longer than its features' anchors, with the number of cells, or with values
that are still larger, is seen only with the first batch; a difference where the copy's own result is not finite is
not seen.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F).
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_amp.adapters.forms.adapted_decoder import AdaptedDecoder
from lightning_amp.adapters.forms.column_layout import Layout, NotRecognised
from lightning_amp.adapters.forms.higlue import Form, forms, make_decoder, read_parts
from lightning_amp.adapters.forms.multires import make_multires, read_bands, resembles_multires
from lightning_amp.adapters.recognise.attention_settings import settings_problem
from lightning_amp.adapters.recognise.module_snapshot import hooked
from lightning_amp.adapters.recognise.real_size import difference, needed_bytes
from lightning_amp.adapters.recognise.small_copy import (
    LARGE,
    NEAR_ONE,
    PAIR,
    Sizes,
    Small,
    drawn_copy,
    drawn_multires,
    small_copy,
    small_multires,
)
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.recompute_state import DEPTH, mark_of
from lightning_amp.techniques.checks.likelihood import checking_values
from lightning_amp.techniques.checks.same_function import failure

CLOSE = 1e-9
TOTAL = "log-probability"
FAR = f"has another {TOTAL} than any of our forms"
SHOWN = 3
AT_ONCE_BYTES = 2**31
"""What a comparison at the real size may take before there is a plan."""
TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""
Results = dict[str, Tensor]


class _Family(NamedTuple):
    """How decoders of one kind are read, copied small and with all anchors, and made of our parts."""

    read: Callable[[nn.Module], Layout]
    small: Callable[[nn.Module, Layout, Sizes], Small]
    drawn: Callable[[nn.Module, Layout, Sizes], Small]
    forms: Callable[[nn.Module, Form], Iterator[Form]]
    make: Callable[[nn.Module, Layout, Form], AdaptedDecoder]


ONE_RESOLUTION = _Family(read_parts, small_copy, drawn_copy, forms, make_decoder)
SEVERAL = _Family(read_bands, small_multires, drawn_multires, lambda _, seen: iter([seen]), make_multires)


@dataclass(frozen=True, eq=False, slots=True)
class _Case:
    """What a form of ours is to compute too."""

    small: Small
    mode: str
    x: Tensor
    expected: Results

    def agrees(self, name: str, found: Tensor) -> bool:
        """Whether a result of ours is the copy's; of large values, if that is finite."""
        expected = self.expected[name]
        if self.small.sizes.large and not expected.isfinite().all():
            return True
        return bool((found - expected).norm() <= CLOSE * expected.norm())


@checking_values(True)
def adapted(module: nn.Module) -> tuple[AdaptedDecoder, bool]:
    """Our decoder for a foreign one, and whether both were compared at the real size.

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


def _adapted(module: nn.Module) -> tuple[AdaptedDecoder, bool]:
    family = SEVERAL if resembles_multires(module) else ONE_RESOLUTION
    layout = family.read(module)
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        raise NotRecognised("has a forward of its own on the instance, or was compiled")
    try:
        inspect.signature(module.forward).bind("u", "v", "b", "l")
    except TypeError as error:
        raise NotRecognised(f"has a forward that does not take u, v, b and l: {error}") from error
    form = _form_of(family, module, layout)
    decoder = family.make(module, layout, form)
    names = hooked(module, decoder)
    if names:
        raise NotRecognised(f"has hooks on modules of it, {names[:SHOWN]!r}, which would not run")
    small_enough = sum(needed_bytes(module, decoder)) <= AT_ONCE_BYTES
    if small_enough:
        _check_real_size(family, module, layout, form)
    return decoder, small_enough


def _check_real_size(family: _Family, module: nn.Module, layout: Layout, form: Form) -> None:
    device = cast(Any, module).scale_lin.device
    real = family.drawn(module, layout, PAIR)
    copied, x = real.module.to(device).train(), real.x("training", binarized=form.binarized).to(device)
    u, v, l, b = (t.detach().to(device) for t in (*real.inputs, real.b))  # noqa: E741
    found = difference(copied, family.make(copied, layout, form), (u, v, b, l), x)
    if found:
        raise NotRecognised(f"has {found} than any of our forms at its real size")


def _form_of(family: _Family, module: nn.Module, layout: Layout) -> Form:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        smalls = [family.small(module, layout, sizes) for sizes in NEAR_ONE]
        first = smalls[0]
        before = _contents(first.module)
        seen = _seen(first)
        cases = [_case(small, seen, mode) for small in smalls for mode in small.modes]
        after = _contents(first.module)
        others = [
            name for name in before.marks | after.marks if before.marks.get(name) != after.marks.get(name)
        ]
        if others:
            raise NotRecognised(f"changes its attributes {others[:SHOWN]!r} in forward, which ours would not")
        cases += _large_cases(family, module, layout, seen)
        problems = []
        for form in family.forms(first.module, seen):
            problems.append(next(_differences(family, cases, form), ""))
            if not problems[-1]:
                return form
    # the form that comes furthest says most
    near = [problem for problem in problems if problem != FAR] or problems
    found = near[0] if near else "has parts of which none of our forms is made"
    raise NotRecognised(found + settings_problem(module))


class _Contents(NamedTuple):
    """What a module and those in it hold, by name; and what was looked at, lest other objects take its place."""

    marks: dict[str, Any]
    kept: list[object]


def _contents(module: nn.Module) -> _Contents:
    seen: dict[int, Any] = {id(child): child for child in module.modules()}
    found: dict[str, Any] = {}
    for fqn, child in module.named_modules():
        own = {name: value for name, value in vars(child).items() if name not in TORCH}
        for name, value in (own | child._parameters | child._buffers | child._modules).items():
            found[f"{fqn}.{name}" if fqn else name] = value
    marks = {name: mark_of(value, seen, DEPTH) for name, value in found.items()}
    return _Contents(marks, [*seen.values(), *found.values()])


def _seen(small: Small) -> Form:
    """What can be told without trying."""
    given = small.run("training")
    kind = _kind_of(given)
    if issubclass(kind, torch.distributions.Bernoulli):
        return Form(kind=kind, chained=_chained(small, given, binarized=True))
    return Form(kind=kind, chained=_chained(small, given, binarized=False), least=_least(small))


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


def _chained(small: Small, given: Any, *, binarized: bool) -> bool:
    layers: Any = getattr(small.module, "value_layers", ())
    if len(small.layout.columns) < 3 or not len(layers):
        return False
    third = given.log_prob(small.x("training", binarized=binarized))[:, slice(*small.layout.columns[2])].sum()
    (grad,) = torch.autograd.grad(third, [layers[0].weight], allow_unused=True)
    return grad is not None and bool(grad.any())


def _least(small: Small) -> float:
    """What is added to means: all that is left of them in cells without contacts."""
    u, v, l = small.inputs  # noqa: E741
    with torch.no_grad():
        given = small.module(u, v, small.b, 0 * l)
        means = (given.logits + cast(Any, small.module).log_theta[small.b]).exp()
    if not torch.allclose(means, means[:1, :1], rtol=CLOSE, atol=0):
        raise NotRecognised("returns different means for cells without contacts")
    return float(f"{float(means[0, 0]):.12g}")


def _case(small: Small, seen: Form, mode: str) -> _Case:
    x = small.x(mode, binarized=seen.binarized)
    return _Case(small, mode, x, _results(small, small.run(mode).log_prob(x).sum()))


def _large_cases(family: _Family, module: nn.Module, layout: Layout, seen: Form) -> Iterator[_Case]:
    """Of large values; none where the copy's distribution refuses what comes of these."""
    for sizes in LARGE:
        try:
            yield _case(family.small(module, layout, sizes), seen, "training")
        except ValueError:
            continue


def _differences(family: _Family, cases: list[_Case], form: Form) -> Iterator[str]:
    """Where a form differs from the copies."""
    try:
        for case in cases:
            small, where, (u, v, l) = case.small, case.small.sizes.where, case.small.inputs  # noqa: E741
            ours = small.ours(family.make(small.module, small.layout, form), case.mode)
            total = -ours.nll(u, v, batch=small.b, library=ours.library(u, l), x=case.x)
            if not case.agrees(TOTAL, total):
                yield FAR + where
                return
            for name, found in _results(small, total).items():
                if not case.agrees(name, found):
                    yield f"has another {name} than any of our forms{where}"
    except NotRecognised as error:
        yield str(error)


def _results(small: Small, total: Tensor) -> Results:
    named = dict(zip(("u", "v", "l"), small.inputs, strict=True))
    if not small.sizes.large:
        named |= dict(small.module.named_parameters())
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    found = {TOTAL: total.detach()}
    for (name, value), grad in zip(named.items(), grads, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(value) if grad is None else grad
    return found
