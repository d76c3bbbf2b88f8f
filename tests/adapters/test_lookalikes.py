"""Claim: a copy of HiGLUE's decoder that computes anything else is not trained as if it were one.

What a small example shows is noted before there is a plan; the rest is an error with the first batch, before a step.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Poisson

from lightning_amp.adapters.adapt import adapt
from lightning_amp.adapters.forms.adapted_decoder import GivenDistribution
from lightning_amp.errors import ModelError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.decoders.stratum import ZINB
from lightning_amp.techniques.contract.protocol import find_decoders
from tests.adapters import foreign_cases
from tests.adapters.higlue_shaped import Copy, Decoder, Foreign, ZeroInflated, cells, randomise

REACH = 54
"""Anchors that no small example has."""


def changing(name: str, *, v: Any = None, u: Any = None, key: Any = None, settings: Any = None) -> type[Decoder]:
    """A decoder that changes v, u or a key, each by a function of the decoder and the tensor, or its settings."""

    class Changed(Decoder):
        def __init__(self, kind: Copy) -> None:
            super().__init__(kind)
            if settings:
                settings(self)

        def forward(self, own_u: Tensor, own_v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
            own_u, own_v = u(self, own_u) if u else own_u, v(self, own_v) if v else own_v
            return super().forward(own_u, own_v, b, l)

        def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
            made, v = super().key(k, v)
            return (key(self, made) if key and k else made), v

    Changed.__name__ = name
    return Changed


class Attending(Decoder):
    """Attention by the package, called in another way."""

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        if k == 0:
            return v, v
        i = k - 1
        p = self.prenorm_layers[i](v)
        qk, value = self.key_layers[i](p), self.value_layers[i](p)
        key = value + self.attend(self.attn_layers[i], qk, p)
        return key + self.ff_activations[i](self.ff_layers[i](self.postnorm_layers[i](key))), v

    def attend(self, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        raise NotImplementedError


def attending(name: str, attend: Any) -> type[Attending]:
    return type(name, (Attending,), {"attend": attend})


def filled(fill: Any) -> Any:
    """The last bucket is filled by hand."""

    def attend(self: Any, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        n = -len(p) % layer.window_size
        qk, longer = (torch.cat([rows, fill(rows, n)]) for rows in (qk, p))
        return layer(qk[None], qk[None], longer[None])[0][: len(p)]  # type: ignore[no-any-return]

    return attend


def masked(off: int) -> Any:
    """Of the last rows so many are not attended to."""

    def attend(self: Any, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        mask = torch.arange(len(p))[None] < len(p) - off
        return layer(qk[None], qk[None], p[None], mask=mask)[0]  # type: ignore[no-any-return]

    return attend


def masked_at_the_real_size(self: Any, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
    fill = -len(p) % layer.window_size
    place = torch.arange(len(p) + fill)[None]
    qk, longer = (F.pad(rows, (0, 0, 0, fill)) for rows in (qk, p))
    mask = (place < REACH) | (place >= len(p))
    return layer(qk[None], qk[None], longer[None], mask=mask)[0][: len(p)]  # type: ignore[no-any-return]


class Skewed(Decoder):
    def shares(self, u: Tensor) -> Tensor:
        return super().shares(u) * 1.001


class InEvaluation(Decoder):
    def shares(self, u: Tensor) -> Tensor:
        return super().shares(u) * (1.0 if self.training else 1.001)


class Uneven(Decoder):
    """Adds another number to every cell's mean."""

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return super().forward(u, v, b, l + 0.001 * torch.arange(1, len(u) + 1)[:, None])


class Poissonian(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return Poisson(super().forward(u, v, b, l).mean)


class NaNs(ZeroInflated):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) * torch.nan


class NotANumber(Decoder):
    """Of which nothing shows, for ours uses the same distribution."""

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        given = super().forward(u, v, b, l)
        return NaNs(given.zi_logits, given.total_count, given.logits)


def aux(self: Any, v: Tensor) -> Tensor:
    """A loss of its own, for the training step to add."""
    self.aux = v.square().mean()
    return v


def counts(self: Any, v: Tensor) -> Tensor:
    """In evaluation mode, and in a tensor; nothing that is computed depends on it yet."""
    if not self.training:
        self.calls += 1
    return v


def counts_at_the_real_size(self: Any, v: Tensor) -> Tensor:
    if len(v) > REACH:
        self.calls += 1
    return v


def remembers(self: Any, v: Tensor) -> Tensor:
    """As an attribute of an object, and of a child."""
    self.seen.cells = len(v)
    self.ff_activations[0].gates = v.sum()
    return v


def clips(self: Any, u: Tensor) -> Tensor:
    """Large gradients alone tell."""
    u = u * 1
    if u.requires_grad:
        u.register_hook(lambda grad: grad.clamp(-200, 200))  # type: ignore[no-untyped-call]
    return u


class Softmax(Decoder):
    """Weights of the strata by a child that none of our forms runs."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.softmax = nn.Softmax(dim=1)

    def shares(self, u: Tensor) -> Tensor:
        return self.softmax(self.strata_weights[None] + self.strata_weight_head(u))  # type: ignore[no-any-return]


class Hooked(Softmax):
    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.softmax.register_forward_pre_hook(lambda _, args: (args[0] / 3,))


def not_padded(self: Any) -> None:
    for layer in self.attn_layers:
        layer.autopad = False


def with_calls(self: Any) -> None:
    self.register_buffer("calls", torch.zeros(()))


VALUE = "another log-probability"
SMALL: dict[Any, str] = {
    Skewed: VALUE,
    NotANumber: VALUE,
    Uneven: "different means for cells without contacts",
    changing("Biased", key=lambda self, key: key + 1e-6): VALUE,
    InEvaluation: VALUE,
    changing("Dropping", key=lambda self, key: F.dropout(key, 0.1, self.training)): VALUE,
    changing("NotPadded", settings=not_padded): "autopad=False where ours has True",
    attending("MaskOffByOne", masked(1)): "has",
    attending("LastRow", filled(lambda rows, n: rows[-1:].expand(n, -1))): VALUE,
    changing("Scaled", u=lambda self, u: u + (u - u.detach())): "another gradient of u",
    changing("Leaving", v=aux, settings=lambda self: setattr(self, "aux", 0.0)): "changes its attributes ['aux']",
    changing("Counting", v=counts, settings=with_calls): "changes its attributes ['calls'] in forward",
    changing("Remembering", v=remembers, settings=lambda self: setattr(self, "seen",
        SimpleNamespace(cells=0))): "changes its attributes ['seen', 'ff_activations.0.gates'] in forward",
    Hooked: "hooks on modules of it, ['softmax']",
    Poissonian: "returns 'Poisson'",
}  # fmt: skip
STRUCTURES: dict[str, Any] = {
    "columns in neither": lambda self: setattr(self, "strata_masks", [rows[::-1] for rows in self.strata_masks]),
    "other numbers of anchors than of columns": lambda self: self.strata_masks.pop(),
    "without indices": lambda self: setattr(self, "feature_masks", [torch.ones(4, dtype=torch.bool)] * 4),
    "and not a list with one list of indices per": lambda self: setattr(self, "feature_masks", torch.arange(4)),
    "cannot be read as lists of indices": lambda self: setattr(self, "feature_masks", [["a"]] * 4),
    "has one stratum only": lambda self: vars(self).update(vars(Decoder(Copy(strata=1)).double())),
    "has 4 strata and lists of [3, 4] layers": lambda self: self.ff_layers.append(nn.Linear(1, 1)),
    "hooks on modules of": lambda self: self.attn_layers[1].register_forward_hook(lambda *_: None),
    "forward that is set on the instance": lambda self: setattr(self, "forward",
        lambda *given: Decoder.forward(self, *given)),
    "not a table of": lambda self: setattr(self, "bias", nn.Parameter(self.bias[:, 1:])),
    "neither the lists of layers": lambda self: [delattr(self, name) for name in ("value_layers", "key_convs")],
}  # fmt: skip
SMALL |= {changing("Structure", settings=change): said for said, change in STRUCTURES.items()}
LARGE = {
    changing("Clamped", key=lambda self, key: key.clamp(-20, 20)): "where v and weights are large",
    changing("ClampedCells", u=lambda self, u: u.clamp(-5, 5)): "where u is large",
    changing("Clipping", u=clips): "another gradient of u than any of our forms where",
}


class LastStratum(Decoder):
    """The last anchors of the last stratum alone."""

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        key, v = super().key(k, v)
        if k == self.copy.strata - 1:
            key = torch.cat([key[:REACH], 1.01 * key[REACH:]])
        return key, v


class Evaluated(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        other = len(v) > REACH and not self.training
        return super().forward(u * 1.001 if other else u, v, b, l)


def buffers(self: Any) -> None:
    self.register_buffer("keep", (torch.arange(self.copy.anchors) < REACH).double()[:, None])
    self.register_buffer("index", torch.arange(self.copy.anchors).clamp_max(REACH))


def product(self: Any, v: Tensor) -> Tensor:
    """Of two parameters that are 0 at first."""
    off = self.prenorm_layers[0].bias[0] * self.prenorm_layers[1].bias[0]
    return v + off if len(v) > REACH else v


GRADIENT = "another gradient in the strata"
REAL: dict[Any, str] = {
    LastStratum: f"{VALUE} in the strata [3]",
    Evaluated: VALUE,
    attending("MaskOfTheReal", masked_at_the_real_size): VALUE,
    changing("ManyCells", u=lambda self, u: u * 1.001 if len(u) == 6 else u): VALUE,
    changing("Columns", u=lambda self, u: u * 1.01 if self.bias.shape[1] > 150 else u): VALUE,
    changing("Frozen", v=lambda self, v: torch.cat([v[:REACH], v[REACH:].detach()])): GRADIENT,
    changing("ByBuffer", v=lambda self, v: v * self.keep[: len(v)], settings=buffers): VALUE,
    changing("ByIndex", v=lambda self, v: v[self.index[: len(v)]], settings=buffers): VALUE,
    changing("Product", v=product): VALUE,
    changing("CountingLater", v=counts_at_the_real_size, settings=with_calls): "changes its attributes ['calls']",
}


BASE = Copy()
LONG = Copy(anchors=61, dim=4)


def foreign(kind: type, copy: Copy = BASE) -> Foreign:
    module = Foreign(copy)
    module.decoder = kind(copy).double()
    return module


@pytest.mark.full
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
