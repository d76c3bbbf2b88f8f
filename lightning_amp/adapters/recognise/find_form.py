"""Which form an instance takes, found by running a small copy of it (small_copy.py) and comparing it with ours.

    nothing else    its forward changes no attribute, buffer or child of it (module_attributes.py), which ours would
                    leave alone
    chained         the derivative of the third stratum's log-probability by the first value layer is not 0
    least           exp(logits + log theta) for cells without contacts
    the form        the first whose summed log-probability, and gradients of it by u, v, l and every parameter, agree
                    to 1e-9, in training and in evaluation mode; for more cells and anchors, and where values are
                    large, those by u, v and l
    the real size   that form agrees for two cells with the real lists, buckets, buffers and numbers (real_size.py)

So a copy that differs in anything that shows in a number is not recognised. Nothing of the instance is changed, and no
random numbers of the caller are used up. Every rank finds the same.

Known limits: what a decoder does with a v longer than its features' anchors, with the number of cells, or with values
that are still larger, is seen with the first batch alone; a difference where the copy's own result is not finite is
not seen.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F).
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_amp.adapters.forms.adapted_decoder import AdaptedDecoder
from lightning_amp.adapters.forms.column_layout import Layout, NotRecognised, read_layout
from lightning_amp.adapters.forms.higlue import Form, check_parts, forms, make_decoder
from lightning_amp.adapters.recognise.attention_settings import settings_problem
from lightning_amp.adapters.recognise.module_attributes import Marks, changes, marks
from lightning_amp.adapters.recognise.real_size import difference, needed_bytes
from lightning_amp.adapters.recognise.small_copy import LARGE, MORE, PAIR, Small, drawn_copy, small_copy
from lightning_amp.adapters.recognise.unused_hooks import hooked
from lightning_amp.errors import AmpError

CLOSE = 1e-9
TOTAL = "log-probability"
FAR = f"has another {TOTAL} than any of our forms"
SHOWN = 3
AT_ONCE_BYTES = 2**31
"""What a comparison at the real size may take before there is a plan."""
Results = dict[str, Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class _Case:
    """What a form of ours is to compute too.

    Attributes:
        small: The copy that was run.
        training: In which mode.
        where: What is special about it, for a message.
        x: The data.
        parameters: Those by which gradients are compared.
        expected: The copy's results.
    """

    small: Small
    training: bool
    where: str
    x: Tensor
    parameters: dict[str, Tensor]
    expected: Results

    def agrees(self, name: str, found: Tensor) -> bool:
        """Whether a result of ours is the copy's; of large values, if that is finite."""
        expected = self.expected[name]
        if self.where and not expected.isfinite().all():
            return True
        return bool((found - expected).norm() <= CLOSE * expected.norm())


def adapted(module: nn.Module) -> AdaptedDecoder:
    """Our decoder for a foreign one.

    Raises:
        NotRecognised: No form of ours computes what the module does.
    """
    layout = read_layout(module)
    check_parts(module, layout)
    form = _form_of(module, layout)
    decoder = make_decoder(module, layout, form)
    check_hooks(module, decoder)
    problem = (
        _at_real_size(module, layout, form) if sum(needed_bytes(module, decoder)) <= AT_ONCE_BYTES else ""
    )
    if problem:
        raise NotRecognised(problem)
    return decoder


def _at_real_size(module: nn.Module, layout: Layout, form: Form) -> str:
    device = cast(Any, module).scale_lin.device
    try:
        real = drawn_copy(module, layout, PAIR)
        copied, inputs = real.module.to(device).train(), [t.to(device) for t in (*real.inputs, real.b)]
        u, v, l, b = inputs  # noqa: E741
        x = real.x(binarized=form.binarized).to(device)
        found = difference(
            copied, make_decoder(copied, layout, form), (u.detach(), v.detach(), b, l.detach()), x
        )
    except AmpError:
        raise
    except Exception as error:
        return f"fails at its real size with {error!r}"
    return f"has {found} than any of our forms at its real size" if found else ""


def _form_of(module: nn.Module, layout: Layout) -> Form:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            small = small_copy(module, layout)
            before = marks(small.module)
            seen = _seen(small)
            cases = [_case(small, seen, training=training) for training in (True, False)]
        except AmpError:
            raise
        except Exception as error:
            raise NotRecognised(
                f"fails on a small example with {error!r}{settings_problem(module)}"
            ) from error
        check_unchanged(before, small.module)
        cases += _further_cases(module, layout, seen)
        problems = []
        for form in forms(small.module, seen):
            problems.append(next(_differences(cases, form), ""))
            if not problems[-1]:
                return form
    # the form that comes furthest says most
    near = [problem for problem in problems if problem != FAR] or problems
    found = near[0] if near else "has parts of which none of our forms is made"
    raise NotRecognised(found + settings_problem(module))


def _seen(small: Small) -> Form:
    """What can be told without trying."""
    given = small.run()
    kind = kind_of(given)
    if issubclass(kind, torch.distributions.Bernoulli):
        return Form(kind=kind, chained=_chained(small, given, binarized=True))
    return Form(kind=kind, chained=_chained(small, given, binarized=False), least=_least(small))


def check_hooks(module: nn.Module, decoder: nn.Module) -> None:
    """Refuse a module with hooks that would not run.

    Raises:
        NotRecognised: Names some of them.
    """
    names = hooked(module, decoder)
    if names:
        raise NotRecognised(f"has hooks on modules of it, {names[:SHOWN]!r}, which would not run")


def check_unchanged(before: Marks, module: nn.Module) -> None:
    """Refuse a module whose forward has changed something of its own.

    Raises:
        NotRecognised: Names some of what is not as it was.
    """
    changed = changes(before, marks(module))
    if changed:
        raise NotRecognised(f"changes {changed[:SHOWN]!r} of its own in forward, which ours would not")


def least_of(means: Tensor) -> float:
    """The one mean of cells without contacts.

    Raises:
        NotRecognised: They have more than one.
    """
    if not torch.allclose(means, means[:1, :1], rtol=CLOSE, atol=0):
        raise NotRecognised("returns means for cells without contacts that are not alike")
    return float(f"{float(means[0, 0]):.12g}")


def kind_of(given: object) -> type:
    """The class of what a decoder returns.

    Raises:
        NotRecognised: It is none of those that ours can make.
    """
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
    third = given.log_prob(small.x(binarized=binarized))[:, slice(*small.layout.columns[2])].sum()
    (grad,) = torch.autograd.grad(third, [layers[0].weight], allow_unused=True)
    return grad is not None and bool(grad.any())


def _least(small: Small) -> float:
    """What is added to means: all that is left of them in cells without contacts."""
    u, v, l = small.inputs  # noqa: E741
    with torch.no_grad():
        given = small.module(u, v, small.b, 0 * l)
        return least_of((given.logits + cast(Any, small.module).log_theta[small.b]).exp())


def _case(small: Small, seen: Form, *, training: bool, where: str = "") -> _Case:
    small.module.train(training)
    x = small.x(binarized=seen.binarized)
    parameters: dict[str, Tensor] = {} if where else dict(small.module.named_parameters())
    total = small.run().log_prob(x).sum()
    return _Case(small, training, where, x, parameters, _results(small, parameters, total))


def _further_cases(module: nn.Module, layout: Layout, seen: Form) -> Iterator[_Case]:
    """Of more cells and anchors, and of large values; where the copy fails with the latter there is none."""
    yield _case(small_copy(module, layout, MORE), seen, training=True, where=MORE.where)
    for sizes in LARGE:
        try:
            yield _case(small_copy(module, layout, sizes), seen, training=True, where=sizes.where)
        except Exception:
            continue


def _differences(cases: list[_Case], form: Form) -> Iterator[str]:
    """Where a form differs from the copies."""
    try:
        for case in cases:
            small, (u, v, l) = case.small, case.small.inputs  # noqa: E741
            ours = make_decoder(small.module, small.layout, form)
            small.module.train(case.training)
            total = -ours.nll(u, v, batch=small.b, library=l, x=case.x)
            if not case.agrees(TOTAL, total):
                yield FAR + case.where
                return
            found = _results(small, case.parameters, total)
            for name in case.expected:
                if not case.agrees(name, found[name]):
                    yield f"has another {name} than any of our forms{case.where}"
    except NotRecognised as error:
        yield str(error)
    except Exception as error:
        yield f"fails in the comparison with {error!r}"


def _results(small: Small, parameters: dict[str, Tensor], total: Tensor) -> Results:
    named = dict(zip(("u", "v", "l"), small.inputs, strict=True)) | parameters
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    found = {TOTAL: total.detach()}
    for (name, value), grad in zip(named.items(), grads, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(value) if grad is None else grad
    return found
