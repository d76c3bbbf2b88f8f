"""Stream and recompute train as the eager decoder does, in all that a training loop does, and keep one stratum."""

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.count_operators import OperatorCounter
from lightning_amp.adapters.forms.adapted_decoder import AdaptedAttentionKey
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import capture
from lightning_amp.installing.install import install
from lightning_amp.models.decoders.stratum import ZINB, Decode
from lightning_amp.models.decoders.stratum_keys import AttentionKey
from lightning_amp.techniques.checks.decoder import decode_problem
from lightning_amp.techniques.checks.key import rows_problem
from lightning_amp.techniques.checks.likelihood import likelihood_problem
from lightning_amp.techniques.hic.rows import StreamStrata
from lightning_amp.techniques.hic.strata.stream import _random_state
from lightning_amp.techniques.hic.strata.streamed_stratum import StreamedKey, streamed_key
from lightning_amp.techniques.precomputed_gradients import gradients, leaf
from tests.techniques.sharded_cases import Case, Model, assert_same, gradient, make_plan, reference, train

FIVE = Case(distances=(0, 1, 3, 4, 5))
FORMS = {
    "independent": FIVE,
    "chained": replace(FIVE, chained=True),
    "chained, all with keys": replace(FIVE, chained=True, distances=(1, 2, 3, 4, 5, 6, 7)),
    "one row for all cells": replace(FIVE, n_batches=1, head=False),
    "one cell": replace(FIVE, cells=1, n_batches=1),
    "full attention, paper, chained": replace(FIVE, key="full_attention", variant="paper", chained=True),
    "binarized": replace(FIVE, binarized=True, chained=True),
}


def installed(case: Case, strategy: str, cells: int = 3) -> Model:
    model = Model(case)
    install(model, make_plan((strategy,), 1, {"stream": StreamStrata(cells=cells)}))
    return model


EVERY = [
    *((form, "stream", (1, 3, 9)[i % 3]) for i, form in enumerate(FORMS)),
    *((form, "recompute", 0) for form in FORMS),
]


@pytest.mark.parametrize(("form", "strategy", "cells"), EVERY)
def test_equals_the_eager_decoder(form: str, strategy: str, cells: int) -> None:
    expected = reference(FORMS[form])
    assert_same(train(installed(FORMS[form], strategy, cells), 3), expected, rtol=1e-12)


def gradients_of(model: Model, run: Callable[[Model], Any]) -> dict[str, Tensor]:
    run(model)
    return {name: gradient(p).clone() for name, p in model.named_parameters()}


def compare(run: Callable[[Model], Any], case: Case = FIVE, strategy: str = "stream") -> None:
    found, expected = gradients_of(installed(case, strategy), run), gradients_of(Model(case), run)
    assert_same(found, expected, rtol=1e-12)


def accumulate(model: Model) -> None:
    for scale in (1.0, 0.5):
        (scale * model()).backward()


def twice_in_one_loss(model: Model) -> None:
    other = {name: t.flip(0) for name, t in model.batch.items()}
    loss = model() + 2 * model.decoder(model.u.flip(0), model.v, **other) + model.v.sin().sum()
    loss.backward()


def with_frozen_parts(model: Model) -> None:
    model.u.requires_grad_(False)
    model.decoder.strata[1].requires_grad_(False)
    model.decoder.strata[2].scale.requires_grad_(False)
    model().backward()


def with_frozen_anchors(model: Model) -> None:
    model.v.requires_grad_(False)
    model().backward()


def with_a_learned_library(model: Model) -> None:
    library = nn.Parameter(model.batch["library"].clone())
    model.decoder(model.u, model.v, **model.batch | {"library": library}).backward()
    # shown as the gradient of what is compared
    model.u.grad = model.u.grad + library.grad


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("strategy", ["stream", "recompute"])
@pytest.mark.parametrize(
    "run", [accumulate, twice_in_one_loss, with_frozen_parts, with_frozen_anchors, with_a_learned_library]
)
def test_in_a_training_loop(run: Callable[[Model], Any], strategy: str, chained: bool) -> None:
    compare(run, replace(FIVE, chained=chained), strategy)


@pytest.mark.parametrize("counts", [1.0, 3e4])
def test_an_overflow_that_no_loss_scale_can_cure_is_told(counts: float) -> None:
    model = installed(FIVE, "stream").float()
    model.batch = {n: t.float() if t.is_floating_point() else t for n, t in model.batch.items()}
    model.batch["x"] = model.batch["x"] * counts
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for half in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", half):
                loss = model()
            assert loss.isfinite()
            assert len(told) == (half == torch.float16 and counts > 1), half
    (2.0**-20 * loss).backward()
    assert model.u.grad.isfinite().all() == (counts == 1), "the scale comes too late"
    assert all("float16 has overflowed" in str(w.message) for w in told)


@pytest.mark.parametrize(("dtype", "large", "told"), [(torch.float16, 2e4, 1), (torch.float32, 2e38, 0)])
def test_float16_parameters_overflow_with_a_warning_too(dtype: torch.dtype, large: float, told: int) -> None:
    model = installed(Case(distances=(0,), head=False), "stream").to(dtype)
    batch = {n: t.to(dtype) if t.is_floating_point() else t for n, t in model.batch.items()}
    # nothing comes from this channel, and much goes back to it
    model.u.data[:, 0], model.v.data[:, 0] = large, 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loss = model.decoder(model.u, model.v, **batch)
    assert loss.isfinite()
    loss.backward()
    assert not model.v.grad.isfinite().all()
    assert len(warned) == told
    assert all("'bf16-true'" in str(w.message) for w in warned)


@pytest.mark.parametrize("chained", [False, True])
def test_no_cells(chained: bool) -> None:
    """The mean over none is 0 / 0, and its gradients are zero."""

    def run(model: Model) -> None:
        u = model.u[:0]
        loss = model.decoder(u, model.v, **{name: t[:0] for name, t in model.batch.items()})
        assert loss.isnan()
        loss.backward()

    compare(run, replace(FIVE, chained=chained))


@pytest.mark.parametrize("strategy", ["stream", "recompute"])
def test_without_gradients_nothing_is_recorded(strategy: str) -> None:
    model, expected = installed(FIVE, strategy), Model(FIVE)()
    with torch.no_grad():
        loss = model()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    frozen = installed(FIVE, strategy).requires_grad_(False)
    assert not frozen().requires_grad


def test_second_derivatives_and_second_backward_passes_are_refused() -> None:
    model = installed(FIVE, "stream")
    with pytest.raises(ModelError, match=r"second derivative .*create_graph=True.* leave 'stream' out"):
        torch.autograd.grad(model(), model.v, create_graph=True)
    loss = model()
    loss.backward(retain_graph=True)
    with pytest.raises(InstallError, match="second backward pass .* compute the loss again"):
        loss.backward()
    # a gradient that would be lost is refused
    stratum = model.decoder.strata[1]
    stratum.likelihood = Outsider(stratum.likelihood, nn.Parameter(torch.ones(7, dtype=torch.float64)))
    with pytest.raises(InstallError, match=r"shapes \[\(7,\)\] .* their gradients would be lost"):
        model()
    model.batch["x"].requires_grad_()
    with pytest.raises(InstallError, match="gradients would be lost"):
        installed(FIVE, "stream").decoder(model.u, model.v, **model.batch)


class Outsider(nn.Module):
    def __init__(self, inner: nn.Module, other: Tensor) -> None:
        super().__init__()
        self.inner, self.others = inner, [other]

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = self.inner(*args)
        return result * self.others[0].sum()


def anchors(model: Model, kept: list[Tensor]) -> None:
    model.decoder.strata[1].key.prenorm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))


def weights(model: Model, kept: list[Tensor]) -> None:
    key = model.decoder.strata[1].key
    key.register_forward_hook(lambda *_: kept.append(key.qk.weight))


def cells(model: Model, kept: list[Tensor]) -> None:
    model.decoder.strata[1].decode.register_forward_pre_hook(lambda _, args: kept.append(args[0]))


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("hook", [anchors, weights, cells])
def test_a_term_of_what_a_stratum_has_read_is_refused(
    hook: Callable[[Model, list[Tensor]], None], chained: bool
) -> None:
    model, kept = installed(replace(FIVE, chained=chained), "stream"), []
    hook(model, kept)
    (model() + kept[0].detach().square().sum()).backward()
    kept.clear()
    loss = model() + kept[0].square().mean()
    with pytest.raises(InstallError, match=r"reached a tensor of shape \(.*its gradient would be lost"):
        loss.backward()


def test_refusing_keeps_no_tensor_alive() -> None:
    collected = gc.isenabled()
    gc.disable()
    try:
        own = leaf(torch.ones(3), needed=True)
        gradients([own.square().sum()], [own], [None])
        kept = weakref.ref(own)
        del own
        assert kept() is None
    finally:
        gc.enable() if collected else None


@pytest.mark.parametrize("strategy", ["stream", "recompute"])
def test_hooks_on_parameters_and_strata_run_once(strategy: str) -> None:
    model, seen = installed(FIVE, strategy), []
    stratum = model.decoder.strata[2]
    stratum.scale.register_hook(lambda grad: seen.append("gradient"))
    stratum.scale.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    stratum.register_forward_hook(lambda *_: seen.append("forward"))
    stratum.register_forward_pre_hook(lambda *_: seen.append("before"))
    model().backward()
    assert sorted(seen) == ["accumulated", "before", "forward", "gradient"]


def with_other_tensors(model: Model) -> None:
    """What meta-learning does: the loss of one's parameters after a step, its gradients taken when they are back."""
    others = {name: (1.3 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    loss = functional_call(model, others, ())
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(others.values())), strict=True):
        p.grad = grad


def freeze_in_between(model: Model) -> None:
    loss = model()
    model.decoder.strata[1].requires_grad_(False)
    loss.backward()


def evaluate_in_between(model: Model) -> None:
    loss = model()
    model.eval()
    loss.backward()
    model.train()


@pytest.mark.parametrize("strategy", ["stream", "recompute"])
@pytest.mark.parametrize("run", [with_other_tensors, freeze_in_between, evaluate_in_between])
def test_the_backward_pass_is_that_of_the_forward_pass(run: Callable[[Model], Any], strategy: str) -> None:
    compare(run, replace(FIVE, chained=True), strategy)


@torch.no_grad()
def change(model: Model, what: str) -> None:
    if what == "counts":
        model.batch["x"].add_(1)
    else:
        model.decoder.strata[1].bias.add_(1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        # torch's own
        ("counts", "modified by an inplace operation"),
        ("table", r"strata\.1 \(Stratum\) cannot be computed again .* 'bias' has been changed in place"),
    ],
)
def test_what_changes_between_the_passes_is_refused(what: str, message: str) -> None:
    model = installed(FIVE, "recompute")
    loss = model()
    change(model, what)
    with pytest.raises((InstallError, RuntimeError), match=message):
        loss.backward()
    model().backward()


class Counting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("others", torch.zeros(()))

    def forward(self, *args: Tensor) -> Tensor:
        self.calls.add_(1)
        self.others = self.others + 1
        return self.inner(*args)


def test_buffers_that_a_stratum_changes_are_changed_once() -> None:
    model = installed(FIVE, "recompute")
    likelihood = Counting(model.decoder.strata[1].likelihood)
    model.decoder.strata[1].likelihood = likelihood
    (model() + model()).backward()
    assert (float(likelihood.calls), float(likelihood.others)) == (2, 2)


def peak(case: Case, strategies: tuple[str, ...], cells: int = 3) -> int:
    model = Model(case)
    install(model, make_plan(strategies, 1, {"stream": StreamStrata(cells=cells)}))
    with LiveBytes() as live:
        model().backward()
    return live.peak


@pytest.mark.long
def test_memory_does_not_grow_with_the_strata() -> None:
    few, many = (replace(FIVE, anchors=200, window=20, distances=tuple(range(k))) for k in (4, 16))
    for strategy in ("stream", "recompute"):
        growth = peak(many, (strategy,)) - peak(few, (strategy,))
        assert growth < 0.1 * (peak(many, ()) - peak(few, ()))


def test_scores_of_all_cells_never_exist() -> None:
    case = replace(FIVE, anchors=400, window=4, dim=4, cells=64, n_batches=1)
    whole, blocks = (peak(case, ("S4", "stream"), cells) for cells in (64, 4))
    assert blocks < 0.35 * whole


# Claim: the key of a streamed stratum, run in fewer operators, is the same in value and all gradients, in every form;
# what is another function, or has hooks, stays as it is.

N, D, W = 11, 4, 3


def key_of(projected: bool, residual: bool) -> AdaptedAttentionKey:
    torch.manual_seed(0)
    layers = dict(AttentionKey(D, W).double().named_children())
    key = AdaptedAttentionKey(layers, projected=projected, residual=residual)
    with torch.no_grad():
        for parameter in key.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return key


def values(run: Any, key: nn.Module, *, handed_on: bool = True) -> dict[str, Tensor]:
    """Results and gradients for a loss that reads them in different ways."""
    generator = torch.Generator().manual_seed(1)
    v, *weights = torch.randn(3, N, D, generator=generator, dtype=torch.float64).unbind()
    v.requires_grad_()
    made, val = run(key, v)
    loss = (made * weights[0]).sum() + (val * weights[1]).sum() * handed_on
    named = {name: p for name, p in key.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, [v, *named.values()], allow_unused=True)
    return {"key": made, "val": val, "of v": found[0], **dict(zip(named, found[1:], strict=True))}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, right in expected.items():
        if right is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], right, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize(("projected", "residual"), list(product((False, True), repeat=2)))
@pytest.mark.parametrize("handed_on", [False, True])
def test_a_key_is_the_same(projected: bool, residual: bool, handed_on: bool) -> None:
    key = key_of(projected, residual)
    run = streamed_key(key)
    assert run == StreamedKey(projected, residual)
    plain = values(type(key).forward, key, handed_on=handed_on)
    same(values(run, key, handed_on=handed_on), plain)


class Scaled(AttentionKey):
    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        key, val = super().forward(v)
        return 1.01 * key, val


def deprecated(kind: Any) -> Any:
    """A class whose forward calls a library that warns."""

    def forward(self: Any, *args: Any) -> Any:
        warnings.warn("`torch.jit.script` is deprecated", FutureWarning, stacklevel=1)
        return kind.forward(self, *args)

    return type("Deprecated", (kind,), {"forward": forward})


def test_a_warning_hides_no_part_of_a_decoder_where_warnings_are_errors() -> None:
    key = streamed_key(deprecated(AttentionKey)(D, W).double())
    assert key == streamed_key(AttentionKey(D, W).double())
    assert key is not None
    assert rows_problem(deprecated(AttentionKey)(D, W), D) == ""
    assert decode_problem(deprecated(Decode)()) == ""
    assert likelihood_problem(deprecated(ZINB)(), ZINB(), whole=(False, False)) == ""
    block = deprecated(nn.Linear)(2, 2)
    assert capture(block, (torch.randn(3, 2),), {}, key=None).reason == ""


def test_another_function_stays() -> None:
    hooked = AttentionKey(D, W)
    hooked.register_forward_hook(lambda *_: None)
    assert streamed_key(Scaled(D, W)) is streamed_key(hooked) is None


def with_bias(key: AdaptedAttentionKey) -> None:
    key.qk = nn.Linear(D, D).double()


def with_hook(key: AdaptedAttentionKey) -> None:
    key.value.register_forward_hook(lambda module, args, out: 2 * out)


@pytest.mark.parametrize("change", [with_bias, with_hook])
def test_projections_that_are_more_than_products_stay_as_they_are(change: Any) -> None:
    key = key_of(False, True)
    change(key)
    same(values(streamed_key(key), key), values(type(key).forward, key))


def test_there_are_fewer_operators() -> None:
    key = key_of(False, True)
    counts = []
    for run in (type(key).forward, streamed_key(key)):
        with OperatorCounter() as counter:
            values(run, key)
        counts.append(counter.kernels)
    assert counts[1] <= counts[0] - 4


def test_a_counted_step_that_draws_nothing_is_seen_to_draw_nothing() -> None:
    """The state was read through a fake tensor, whose numbers are whatever lies there."""
    with QuickFakes(valid=True):
        assert len({_random_state() for _ in range(50)}) == 1
