"""Claim: what stands in for a foreign decoder returns what eager code would have computed at the call, or refuses.

Tensors, autograd and the foreign module may change between the moment a plan is installed, the call, and the sum.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_amp.adapters.adapt import adapt
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.lightning.steps.training_step import FiniteCheck
from lightning_amp.techniques.contract.protocol import find_decoders
from tests.adapters.foreign_cases import example
from tests.adapters.higlue_shaped import Copy, Decoder, Foreign

BASE = Copy(strata=3)


class Fuller(Decoder):
    """With children, a buffer and a tensor that ours does not run or read."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.dropout, self.softmax = nn.Dropout(0.0), nn.Softmax(dim=1)
        self.register_buffer("temperature", torch.full((), 1 / 3))
        self.shift = torch.zeros(2)

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        key, v = super().key(k, v)
        return self.dropout(key) * self.temperature / self.temperature + self.shift[0].to(key), v

    def shares(self, u: Tensor) -> Tensor:
        return self.softmax(self.strata_weights[None] + self.strata_weight_head(u))  # type: ignore[no-any-return]


def fuller() -> tuple[Foreign, "Given", Tensor]:
    module, given, x = example(BASE)
    decoder = Fuller(BASE).double()
    # before that it was of float32
    decoder.temperature.fill_(1 / 3)
    decoder.load_state_dict(module.decoder.state_dict(), strict=False)
    module.decoder = decoder
    return module, given, x


Given = tuple[Tensor, Tensor, Tensor, Tensor]


def no_grad_at_the_call(module: Foreign, given: Given, x: Tensor) -> Any:
    with torch.no_grad():
        distribution = module.decoder(*given)
    return distribution.log_prob(x)


def no_grad_at_log_prob(module: Foreign, given: Given, x: Tensor) -> Any:
    distribution = module.decoder(*given)
    with torch.no_grad():
        return distribution.log_prob(x)


def inference_at_the_call(module: Foreign, given: Given, x: Tensor) -> Any:
    with torch.inference_mode():
        distribution = module.decoder(*given[:3], given[3].clone())
    with torch.no_grad():
        return distribution.log_prob(x)


@pytest.mark.filterwarnings("ignore:.*requires gradients")
def test_gradients_are_made_only_where_they_were_enabled_all_the_time() -> None:
    module, given, x = example(BASE)
    for asked in (no_grad_at_the_call, no_grad_at_log_prob, inference_at_the_call):
        right = asked(module, given, x)
        installed = adapt(module)
        found = asked(module, given, x)
        for reduced in (Tensor.mean, lambda y: y.sum(1)):
            one, other = reduced(found), reduced(right)
            assert one.requires_grad is other.requires_grad is False
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        installed.undo()


def thaw(module: Foreign, given: Given, x: Tensor) -> None:
    module.decoder.bias.requires_grad_(True)


def step(module: Foreign, given: Given, x: Tensor) -> None:
    module.decoder.log_theta.grad = torch.ones_like(module.decoder.log_theta)
    torch.optim.SGD([module.decoder.log_theta], lr=0.1).step()


def in_place(of: Callable[[Given, Tensor], Tensor]) -> Callable[[Foreign, Given, Tensor], None]:
    def change(module: Foreign, given: Given, x: Tensor) -> None:
        with torch.no_grad():
            of(given, x).mul_(1)

    return change


BETWEEN: dict[str, tuple[Any, str]] = {
    "thawed": (thaw, "requires_grad of bias was False and is True"),
    "stepped": (step, "log_theta was changed in place"),
    **{
        name: (in_place(lambda given, x, i=i: given[i]), f"{name} was changed in place")  # type: ignore[misc]
        for i, name in enumerate("uvbl")
    },
    "x": (in_place(lambda given, x: x), "x was changed in place"),
}


def test_a_change_between_call_and_sum_is_refused() -> None:
    for change, said in BETWEEN.values():
        module, given, x = example(BASE)
        adapt(module)
        module.decoder.bias.requires_grad_(False)
        log_prob = module.decoder(*given).log_prob(x)
        change(module, given, x)
        for reduced in (Tensor.mean, lambda y: y.sum(1)):
            with pytest.raises(InstallError, match=f"since its call.*{said}.*strategies='S1'"):
                reduced(log_prob)


def without_attention(decoder: Decoder) -> None:
    decoder.use_attn = False


def another_layer(decoder: Decoder) -> None:
    decoder.value_layers[0] = nn.Linear(12, 12, bias=False).double()


CHANGES: dict[Any, str] = {
    without_attention: "'use_attn' was True and is False",
    lambda d: setattr(d.attn_layers[1], "window_size", 3): "'attn_layers.1.window_size' was 5 and is 3",
    another_layer: "'value_layers.0' is another Linear",
    lambda d: prune.l1_unstructured(d.value_layers[0], "weight", amount=0.5): "'value_layers.0.weight' is not there",
    lambda d: d.attn_layers[0].register_forward_hook(lambda *_: None): "'attn_layers.0' has hooks",
    lambda d: setattr(d.dropout, "p", 0.5): r"'dropout\.p' was 0\.0 and is 0\.5",
    lambda d: d.temperature.mul_(0.9): "'temperature' has other values than it had",
    lambda d: d.shift.add_(0.1): "'shift' has other values than it had",
    lambda d: d.softmax.register_forward_pre_hook(lambda *_: None): "'softmax' has hooks, which would not run",
}


@pytest.mark.long
def test_a_decoder_that_is_changed_later_is_refused() -> None:
    for change, said in CHANGES.items():
        module, given, _ = fuller()
        found = adapt(module)
        module.decoder(*given)
        change(module.decoder)
        with pytest.raises(InstallError, match=f"'Fuller' has changed.*{said}.*strategies='S1'"):
            module.decoder(*given)
        found.undo()
        module.decoder(*given)


def test_hooks_on_a_layer_run_until_a_technique_replaces_it() -> None:
    module, given, x = example(BASE)
    calls: list[Any] = []
    adapt(module)
    module.decoder.key_layers[0].register_forward_hook(lambda *_: calls.append(1))
    module.decoder(*given).log_prob(x).sum()
    assert calls
    ours: Any = find_decoders(module)["decoder"]
    ours.strata[1].key.qk = copy.copy(module.decoder.key_layers[0])
    with pytest.raises(InstallError, match=r"'key_layers\.0' has hooks, which would not run"):
        module.decoder(*given)


def test_an_argument_that_ours_does_not_know_is_refused() -> None:
    module, (u, v, b, l), _ = example(BASE)  # noqa: E741
    adapt(module)
    module.decoder(u, v, l=l, b=b)
    for given, named in [((u, v, b, l), {"t": 1}), ((u, v, b, l, 1), {}), ((u, v, b), {}), ((u, v, b), {"b": b})]:
        with pytest.raises(InstallError, match="was called with . arguments.*allowed are"):
            module.decoder(*given, **named)


def test_parameters_of_a_functional_call_are_refused_if_they_are_others() -> None:
    module, given, x = example(BASE)
    adapt(module)
    own = dict(module.decoder.named_parameters())
    others = {name: value.detach() + 1 for name, value in own.items()}
    with pytest.raises(InstallError, match="'scale_lin' is another Tensor"):
        torch.func.functional_call(module.decoder, others, given)
    assert torch.isfinite(torch.func.functional_call(module.decoder, own, given).log_prob(x).mean())


def test_a_module_that_is_moved_copied_or_watched_is_still_the_same() -> None:
    module, given, x = fuller()
    adapt(module)
    watch = FiniteCheck(module, rank=0, gradients=False)
    module.float().double().eval().to("cpu")
    module.decoder(*given)
    module.load_state_dict(module.state_dict())
    module.decoder.last_seen = torch.ones(1)
    expected = module.decoder(*given).log_prob(x).mean()
    watch.remove()
    other = copy.deepcopy(copy.deepcopy(module))
    assert torch.equal(other.decoder(*given).log_prob(x).mean(), expected)
    without_attention(other.decoder)
    module.decoder(*given)
    with pytest.raises(InstallError, match="'use_attn' was True and is False"):
        other.decoder(*given)
    another_layer(module.decoder)
    with pytest.raises(InstallError, match=r"'value_layers\.0' is another Linear"):
        module.decoder(*given)


def test_a_buffer_may_be_rounded_by_a_type_but_not_stay_so() -> None:
    module, given, _ = fuller()
    adapt(module)
    module.bfloat16()
    module.decoder(*given)
    module.double()
    with pytest.raises(InstallError, match="'temperature' has other values than it had"):
        module.decoder(*given)


def in_place_later(y: Any) -> Tensor:
    weight = torch.tensor(0.3, dtype=torch.float64)
    waiting = y * weight
    weight.fill_(5)
    return waiting.mean()  # type: ignore[no-any-return]


def without_gradients(y: Any) -> Tensor:
    with torch.no_grad():
        waiting = -y
    return (waiting / 2).mean()  # type: ignore[no-any-return]


def added_in_place(y: Any) -> Tensor:
    total = y.sum()
    total += 1
    return total * y.sum()  # type: ignore[no-any-return]


def assigned_in_place(y: Any) -> Tensor:
    y += 1
    y *= 2
    return y.mean()  # type: ignore[no-any-return]


LEARNED = nn.Parameter(torch.tensor(0.3))
NUMBERS: dict[str, Callable[[Any], Tensor]] = {
    "bfloat16": lambda y: (y * torch.tensor(0.3, dtype=torch.bfloat16)).mean(),
    "learned": lambda y: (y * LEARNED).mean(),
    "named": lambda y: torch.mul(y, other=3).mean(),
    **{f.__name__: f for f in (in_place_later, without_gradients, added_in_place, assigned_in_place)},
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*requires gradients")
def test_numbers_do_to_the_sum_what_they_do_to_a_tensor() -> None:
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        module, given, x = example(BASE)
        module.to(dtype)
        u, v, b, l, x = (one.detach().to(dtype) if one.is_floating_point() else one for one in (*given, x))  # noqa: E741
        right = [numbers(module.decoder(u, v, b, l).log_prob(x)) for numbers in NUMBERS.values()]
        adapt(module)
        for (name, numbers), expected in zip(NUMBERS.items(), right, strict=True):
            found = numbers(module.decoder(u, v, b, l).log_prob(x))
            assert (found.dtype, found.requires_grad) == (dtype, expected.requires_grad)
            torch.testing.assert_close(found, expected, rtol=rtol, atol=0)
            if name == "learned":
                one, other = (torch.autograd.grad(y, LEARNED)[0] for y in (found, expected))
                torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


CHANGED: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda y: y.mul_(2),
    "neg": lambda y: torch.neg(y, out=y),
    "__setitem__": lambda y: y.__setitem__(0, 0.0),
    "register_hook": lambda y: y.register_hook(lambda grad: 2 * grad),
    "__set__": lambda y: setattr(y, "requires_grad", False),
}


@pytest.mark.filterwarnings("ignore:.*requires gradients")
def test_what_is_changed_in_place_or_watched_is_refused() -> None:
    module, given, x = example(BASE)
    adapt(module)
    for name, change in CHANGED.items():
        log_prob = module.decoder(*given).log_prob(x)
        with (
            torch.set_grad_enabled(name == "register_hook"),
            pytest.raises(InstallError, match=f"'{name}' is not supported on log_prob.*would be lost"),
        ):
            change(log_prob)


def test_rows_that_the_tables_do_not_have_are_refused() -> None:
    for rows in (1, 2):
        module, (u, v, b, l), x = example(Copy(strata=3, experiments=rows))  # noqa: E741
        expected = module.decoder(u, v, b - rows, l).log_prob(x).mean()
        adapt(module)
        torch.testing.assert_close(module.decoder(u, v, b - rows, l).log_prob(x).mean(), expected)
        for wrong in (b + rows, b - 2 * rows, b.double(), b[:-1], b > 0, None):
            with pytest.raises(ModelError, match="called with b.*allowed is the row of the tables for every"):
                module.decoder(u, v, wrong, l)


def test_what_goes_around_its_functions_is_refused() -> None:
    module, given, x = example(BASE)
    adapt(module)
    log_prob = module.decoder(*given).log_prob(x)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(InstallError, match="computes when it is summed"):
        torch.add(log_prob, 1)
