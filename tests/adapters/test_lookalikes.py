"""Claim: a copy of HiGLUE's decoder that computes anything else is not trained as if it were one.

What a small example shows is noted before there is a plan; the rest is an error with the first batch, before a step.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.adapters.adapt import adapt
from lightning_amp.adapters.forms.adapted_decoder import GivenDistribution
from lightning_amp.errors import ModelError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.decoders.stratum import ZINB
from lightning_amp.techniques.contract.protocol import find_decoders
from tests.adapters import foreign_cases
from tests.adapters.higlue_shaped import Copy, Decoder, Foreign, ZeroInflated, cells, randomise
from tests.adapters.lookalikes import LARGE, REACH, REAL, SMALL, changing

BASE = Copy()
LONG = Copy(anchors=61, dim=4)


def foreign(kind: type, copy: Copy = BASE) -> Foreign:
    module = Foreign(copy)
    module.decoder = kind(copy).double()
    return module


@pytest.mark.long
def test_what_a_small_example_shows_is_noted_and_left_alone() -> None:
    for kind, said in (SMALL | LARGE).items():
        module, state = foreign(kind), torch.get_rng_state()
        before = vars(module.decoder).get("forward")
        found = adapt(module)
        assert torch.equal(torch.get_rng_state(), state), "no random number was used"
        assert not found.decoders, kind.__name__
        (note,) = found.notes
        assert "'decoder' looks like a decoder of HiGLUE's shape and is trained as any other" in note
        assert said in note, f"{kind.__name__}: {note}"
        assert vars(module.decoder).get("forward") is before
        assert find_decoders(module) == {}


def first_call(module: Foreign, *, training: bool = True, more_rows: int = 0) -> Tensor:
    """The log-probability of a first batch, under what stands in for the decoder."""
    found = adapt(module)
    assert found.decoders, found.notes
    decoder: Any = module.decoder.train(training)
    assert decoder.forward.first_batch.allow(usual=0, free=None) == ""
    batch = cells(module.decoder.copy)
    u = torch.randn(6, module.decoder.copy.dim, dtype=torch.float64)
    v = torch.cat([module.anchors, module.anchors[:more_rows]])
    return decoder(u, v, batch["b"], batch["l"]).log_prob(batch["x"]).sum()  # type: ignore[no-any-return]


@pytest.mark.long
def test_what_the_real_size_shows_is_refused_with_the_first_batch() -> None:
    for kind, said in REAL.items():
        module = foreign(kind, LONG)
        randomise(module)
        with torch.no_grad():
            for layer in module.decoder.prenorm_layers:
                layer.bias.zero_()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(ModelError, match=r"on the first batch of 6 cells and 61 rows of v.*'S1'") as caught:
            first_call(module, training=kind.__name__ != "Evaluated")
        assert said in str(caught.value), f"{kind.__name__}: {caught.value}"
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_refusal_with_the_first_batch_comes_before_a_step() -> None:
    for strategies in ("S1,stream", "S1,fused"):
        module = foreign(changing("Crowded", u=lambda self, u: u * 1.001 if len(u) == 6 else u), LONG)
        before = {name: value.clone() for name, value in module.decoder.state_dict().items()}
        with pytest.raises(ModelError, match="another log-probability in the strata .* on the first batch"):
            foreign_cases.trained(module, foreign_cases.batches(LONG)[:2], strategies)
        state = module.decoder.state_dict()
        assert all(torch.equal(before[name], value) for name, value in state.items())


class NoJvp(torch.autograd.Function):
    """Without a derivative forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def test_a_comparison_that_fails_is_an_error_where_a_decoder_may_be_changed() -> None:
    def fails(self: Any, v: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    def fails_later(self: Any, v: Tensor) -> Tensor:
        assert len(v) <= REACH, "at the real size alone"
        return v

    module = foreign(changing("Fails", v=fails))
    with pytest.raises(ModelError, match=r"fails where it is compared with ours, with RuntimeError.*'S1'"):
        adapt(module)
    (note,) = adapt(module, needed=False).notes
    assert "RuntimeError" in note
    for later, said in (
        (fails_later, "AssertionError: at the real size"),
        (lambda self, v: NoJvp.apply(v), "NotImplementedError"),
    ):
        with pytest.raises(ModelError, match=f"fails where it is compared with what the plan.*with {said}.*'S1'"):
            first_call(foreign(changing("Later", v=later), LONG))


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"causal": True}, "causal=True where ours has False, look_forward=0 where ours has 1"),
    ({"scale": 1.0}, "scale=1.0 where ours has None"),
    ({"dropout": 0.1}, "dropout=0.1 where ours has none"),
    ({"shared_qk": False}, "shared_qk=False where ours has True"),
]


def test_a_refusal_names_the_setting_of_attention_that_differs() -> None:
    for setting, said in SETTINGS:
        module = foreign(Decoder)
        usual = {"dim": BASE.dim, "window_size": BASE.window, "autopad": True, "shared_qk": True} | setting
        layers = [type(layer)(**usual) for layer in module.decoder.attn_layers]
        module.decoder.attn_layers = nn.ModuleList(layers)
        (note,) = adapt(module).notes
        assert f"its attention has {said}" in note


class Rarer(ZeroInflated):
    least = 1e-12


class RarerZeros(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        given = super().forward(u, v, b, l)
        return Rarer(given.zi_logits, given.total_count, given.logits)


@pytest.mark.parametrize(("kind", "likelihood"), [(Decoder, ZINB), (RarerZeros, GivenDistribution)])
def test_a_small_number_that_shows_only_where_zeros_are_rare_is_found(kind: Any, likelihood: type) -> None:
    module = foreign(kind, Copy(least_zero=0.0))
    adapt(module)
    ours: Any = find_decoders(module)["decoder"]
    assert isinstance(ours.strata[0].likelihood, likelihood)


def test_no_random_number_is_used_and_nothing_changed_with_the_first_batch() -> None:
    module, given, x = foreign_cases.example(BASE)
    adapt(module)
    forward: Any = vars(module.decoder)["forward"]
    assert forward.first_batch.allow(usual=0, free=None) == ""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode():
        module.decoder(*given).log_prob(x).sum()
    module.decoder(*given).log_prob(x).sum().backward()
    assert forward.first_batch._calls == {(True, True, False), (True, True, True)}, "derivatives with gradients"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_where_there_is_no_memory_the_plan_says_that_it_was_not_compared() -> None:
    strategy = AMPStrategy(strategies=["S1", "stream"], device_memory="500KiB")
    copy = Copy(anchors=60)
    foreign_cases.fit(Foreign(copy), foreign_cases.batches(copy)[:2], strategy)
    assert strategy.plan is not None
    assert strategy.plan.fits
    (note,) = (note for note in strategy.plan.notes if "is not compared with its own forward" in note)
    assert "'decoder' was detected by a small example" in note
