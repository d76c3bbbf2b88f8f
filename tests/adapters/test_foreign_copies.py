"""Claim: a copy of HiGLUE's decoder that computes anything else is not taken for it, and the reason is given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.adapters.adapt import adapt
from lightning_amp.adapters.forms.adapted_stratum import GivenDistribution
from lightning_amp.models.decoders.stratum import ZINB
from lightning_amp.techniques.contract.protocol import find_decoders
from tests.adapters.higlue_shaped import Copy, Decoder, Foreign, ZeroInflated

BASE = Copy()


class Skewed(Decoder):
    def shares(self, u: Tensor) -> Tensor:
        return super().shares(u) * 1.001


class Dropping(Decoder):
    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        key, v = super().key(k, v)
        return nn.functional.dropout(key, 0.1, self.training), v


class Causal(Decoder):
    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        for layer in self.attn_layers:
            layer.causal, layer.look_forward = True, 0


class Scaled(Decoder):
    """Gradients alone tell: what is added is detached."""

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return super().forward(u + (u - u.detach()), v, b, l)


class Poissonian(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return torch.distributions.Poisson(super().forward(u, v, b, l).mean)


class Timed(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor, t: Tensor) -> Any:  # noqa: E741
        return super().forward(u, v, b, l + t)


class Leaving(Decoder):
    """A loss of its own, for the training step to add."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.aux: Any = 0.0

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        self.aux = v.square().mean()
        return super().forward(u, v, b, l)


class Collecting(Decoder):
    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.losses: dict[str, list[Tensor]] = {"keys": []}

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        key, v = super().key(k, v)
        self.losses["keys"].append(key.square().mean())
        return key, v


class Counting(Decoder):
    """In evaluation mode, and in a tensor; nothing that is computed depends on it yet."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        if not self.training:
            self.calls += 1
        return super().forward(u, v, b, l)


class Remembering(Decoder):
    """As an attribute of an object, and of a child."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.seen = SimpleNamespace(cells=0)

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        self.seen.cells = len(u)
        self.ff_activations[0].gates = v.sum()
        return super().forward(u, v, b, l)


class Clamped(Decoder):
    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        key, v = super().key(k, v)
        return key.clamp(-10, 10), v


class ClampedBranches(Decoder):
    """What comes after a LayerNorm is large where weights are."""

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        key, v = super().key(k, v)
        return (key.clamp(-20, 20) if k else key), v


class ClampedCells(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return super().forward(u.clamp(-5, 5), v, b, l)


class Clipping(Decoder):
    """Large gradients alone tell."""

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        u = u * 1
        if u.requires_grad:
            u.register_hook(lambda grad: grad.clamp(-200, 200))  # type: ignore[no-untyped-call]
        return super().forward(u, v, b, l)


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


class Rarer(ZeroInflated):
    least = 1e-12


class RarerZeros(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        given = super().forward(u, v, b, l)
        return Rarer(given.zi_logits, given.total_count, given.logits)


def shuffled(decoder: Decoder) -> None:
    decoder.strata_masks = [rows[::-1] for rows in decoder.strata_masks]


def truncated(decoder: Decoder) -> None:
    decoder.strata_masks = decoder.strata_masks[:-1]


def one_array(decoder: Decoder) -> None:
    decoder.feature_masks = torch.arange(4)  # type: ignore[assignment]


def words(decoder: Decoder) -> None:
    decoder.feature_masks = [["a"]] * 4  # type: ignore[list-item]


def one_stratum(decoder: Decoder) -> None:
    vars(decoder).update(vars(Decoder(Copy(strata=1)).double()))


def one_layer_more(decoder: Decoder) -> None:
    decoder.ff_layers.append(nn.Linear(1, 1))


class Uneven(Decoder):
    """Adds another number to every cell's mean."""

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return super().forward(u, v, b, l + 0.001 * torch.arange(1, len(u) + 1)[:, None])


def booleans(decoder: Decoder) -> None:
    decoder.feature_masks = [torch.ones(4, dtype=torch.bool)] * 4


def hooked(decoder: Decoder) -> None:
    decoder.attn_layers[1].register_forward_hook(lambda *_: None)


def own_forward(decoder: Decoder) -> None:
    decoder.forward = lambda *inputs: Decoder.forward(decoder, *inputs)  # type: ignore[method-assign]


def narrow(decoder: Decoder) -> None:
    decoder.bias = nn.Parameter(decoder.bias[:, 1:])


def layerless(decoder: Decoder) -> None:
    del decoder.value_layers, decoder.key_convs


DIFFERENT: dict[Any, str] = {
    Skewed: "another log-probability",
    Dropping: "another log-probability",
    Causal: "another log-probability",
    Scaled: "another gradient of u",
    Leaving: "changes its attributes ['aux'] in forward",
    Collecting: "changes its attributes ['losses'] in forward",
    Counting: "changes its attributes ['calls'] in forward",
    Remembering: "changes its attributes ['seen', 'ff_activations.0.gates'] in forward",
    Clamped: "any of our forms where v and weights are large",
    ClampedBranches: "any of our forms where v and weights are large",
    ClampedCells: "another log-probability than any of our forms where u is large",
    Clipping: "another gradient of u than any of our forms where",
    Hooked: "hooks on modules of it, ['softmax']",
    Poissonian: "returns 'Poisson'",
    Timed: "has a forward that does not take u, v, b and l: missing a required argument: 't'",
    shuffled: "columns in neither",
    truncated: "other numbers of anchors than of columns",
    booleans: "without indices",
    one_array: "and not a list with one list of indices per stratum",
    words: "cannot be read as lists of indices",
    one_stratum: "has one stratum only",
    one_layer_more: "has 4 strata and lists of [3, 4] layers",
    Uneven: "different means for cells without contacts",
    hooked: "hooks on modules of",
    own_forward: "forward of its own",
    narrow: "not a table of",
    layerless: "neither the lists of layers",
}


@pytest.mark.long
@pytest.mark.parametrize("change", DIFFERENT, ids=lambda change: change.__name__)
def test_a_copy_that_differs_is_told_apart(change: Any) -> None:
    module = Foreign(BASE)
    if isinstance(change, type):
        module.decoder = change(BASE).double()
    else:
        change(module.decoder)
    before, state = vars(module.decoder).get("forward"), torch.get_rng_state()
    found = adapt(module)
    assert torch.equal(torch.get_rng_state(), state), "no random number was used up"
    assert not found.decoders
    assert "'decoder' looks like a decoder of HiGLUE's shape and is trained as any other" in found.notes[0]
    assert DIFFERENT[change] in found.notes[0]
    assert vars(module.decoder).get("forward") is before
    assert find_decoders(module) == {}


@pytest.mark.parametrize(("kind", "likelihood"), [(Decoder, ZINB), (RarerZeros, GivenDistribution)])
def test_a_small_number_that_shows_only_where_zeros_are_rare_is_found(kind: Any, likelihood: type) -> None:
    module = Foreign(Copy(least_zero=0.0))
    module.decoder = kind(Copy(least_zero=0.0)).double()
    adapt(module)
    ours: Any = find_decoders(module)["decoder"]
    assert isinstance(ours.strata[0].likelihood, likelihood)


def test_looking_at_a_decoder_changes_nothing_of_it() -> None:
    module = Foreign(BASE)
    module.decoder = Counting(BASE).double()
    adapt(module)
    assert module.decoder.calls == 0
