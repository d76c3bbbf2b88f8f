"""Claim: a copy of HiGLUE's decoder that computes anything else is not taken for it, and the reason is given."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.adapters.adapt import adapt
from lightning_amp.parallel.protocol import find_decoders
from tests.higlue_shaped import Copy, Decoder, Foreign

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


class Raising(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        assert len(v) == self.copy.anchors
        return super().forward(u, v, b, l)


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
    Poissonian: "returns 'Poisson'",
    Raising: "fails on a small example with AssertionError",
    shuffled: "columns in neither",
    truncated: "other numbers of anchors than of columns",
    booleans: "without indices",
    one_array: "and not a list with one list of indices per stratum",
    words: "cannot be read as lists of indices",
    one_stratum: "has one stratum only",
    one_layer_more: "has 4 strata and lists of [3, 4] layers",
    Uneven: "means for cells without contacts that are not alike",
    hooked: "hooks on modules of",
    own_forward: "forward of its own",
    narrow: "not a table of",
    layerless: "neither the lists of layers",
}


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
