"""Claim: the key of a streamed stratum, run in fewer operators, is the same in value and all gradients, in every form;
what is another function, or has hooks, stays as it is.
"""

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.count_operators import OperatorCounter
from lightning_amp.adapters.forms.adapted_decoder import AdaptedAttentionKey
from lightning_amp.graph.capture import capture
from lightning_amp.models.decoders.stratum import ZINB, Decode
from lightning_amp.models.decoders.stratum_keys import AttentionKey
from lightning_amp.techniques.checks.decoder import decode_problem
from lightning_amp.techniques.checks.key import rows_problem
from lightning_amp.techniques.checks.likelihood import likelihood_problem
from lightning_amp.techniques.hic.strata.streamed_stratum import StreamedKey, streamed_key

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
