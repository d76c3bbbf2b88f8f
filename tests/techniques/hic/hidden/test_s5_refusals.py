"""Claim: S5 refuses every part of a decoder that it does not know, says which and why, and changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.installing.install import change_of, install
from lightning_amp.models.decoders.stratified import Decode
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.techniques.hic.rows import HiddenParallel
from tests.techniques.sharded_cases import Case, Model, fake_mesh, make_plan


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Clamped(Decode):
    def forward(self, u: Tensor, key: Tensor, nodes: Tensor) -> Tensor:
        return super().forward(u, key, nodes).clamp(-50, 50)


def set_child(path: str, child: Any, key: str = "attention") -> nn.Module:
    """A decoder with another module in one place."""
    decoder = Model(Case(dim=8, key=key)).decoder  # type: ignore[arg-type]
    parent, _, name = path.rpartition(".")
    module = decoder.get_submodule(parent)
    if child is None:
        delattr(module, name)
    else:
        module._modules.pop(name, None)
        setattr(module, name, child)
    return decoder


REFUSALS = [
    (
        "strata.1.key.qk",
        None,
        "attention",
        r"'strata.1.key', which is 'AttentionKey' with the children \['prenorm', ",
    ),
    (
        "strata.1.key.gain",
        nn.Parameter(torch.ones(8)),
        "attention",
        r"'strata.1.key', .* the state \['gain'\]",
    ),
    ("strata.2.key.qk", nn.Bilinear(8, 8, 8), "attention", "'strata.2.key.qk', which is Bilinear"),
    (
        "strata.2.key.value",
        Doubled(8, 8),
        "attention",
        r"'strata.2.key.value', .* allowed is nn.Linear\(8, 8\)",
    ),
    (
        "strata.1.key.prenorm",
        nn.LayerNorm((23, 8)),
        "attention",
        r"allowed is nn.LayerNorm\(8\) or nn.Identity",
    ),
    (
        "strata.1.key.attention",
        nn.Identity(),
        "attention",
        r"which is Identity\(\) with D=8; allowed is attention",
    ),
    (
        "strata.1.key.pairs",
        nn.Conv1d(8, 8, 2),
        "convolution",
        "allowed is a depthwise nn.Conv1d of 8 channels",
    ),
    (
        "strata.1.key.pairs",
        nn.Conv1d(8, 8, 2, groups=8, padding_mode="circular"),
        "convolution",
        "padded with zeros",
    ),
    (
        "strata.1.key.activation",
        nn.PReLU(8),
        "convolution",
        "which is PReLU.*; allowed is one of .*'LeakyReLU'",
    ),
    (
        "strata.0.decode",
        None,
        "attention",
        "'strata.0.decode', which is 'missing', no module; allowed is a module",
    ),
    ("strata.0.decode", Clamped(), "attention", "which is Clamped.*, returns .* for a small example"),
    ("strata.0.decode", nn.Identity(), "attention", "fails on a small example with TypeError"),
    ("strata.0.decode", nn.Bilinear(2, 2, 1), "attention", r"has the state \['bias', 'weight'\]"),
    ("region", None, "attention", "whose child `region` is None"),
    ("strata", nn.Linear(2, 2), "attention", "is no decomposed decoder .`strata`, `chained`"),
]


@pytest.mark.parametrize(("path", "child", "key", "message"), REFUSALS)
def test_refuses_what_it_cannot_deal(path: str, child: Any, key: str, message: str) -> None:
    decoder = set_child(path, child, key)
    before = dict(decoder.named_modules())
    with pytest.raises(InstallError, match=f"(?s)S5 .*{message}.*leave S5 out"):
        change_of(decoder, HiddenParallel(), fake_mesh(rank=0, ranks=2), strategy="S5")
    assert dict(decoder.named_modules()) == before


def test_refuses_a_stratum_without_key_and_to_be_installed_twice() -> None:
    decoder = Model(Case(dim=8)).decoder
    del decoder.strata[0].key
    mesh = fake_mesh(rank=0, ranks=2)
    with pytest.raises(
        InstallError, match=r"'strata.0.key', which is 'missing'; allowed is a module, or None"
    ):
        change_of(decoder, HiddenParallel(), mesh, strategy="S5")
    model = Model(Case(dim=8))
    install(model, make_plan(("S5",), 2), mesh)
    with pytest.raises(InstallError, match="(?s)'strata.0.decode', .* sharded before"):
        change_of(model.decoder, HiddenParallel(), mesh, strategy="S5")


class OddAttention(LocalAttention):
    """Attention without rotary could have any dimension; this one only looks like it."""

    def __init__(self) -> None:
        super().__init__(6, 5)


def test_refuses_an_odd_dimension_with_attention() -> None:
    decoder = Model(Case(dim=8, distances=(1,))).decoder
    key = decoder.strata[0].key
    key.prenorm = key.postnorm = nn.Identity()  # type: ignore[union-attr]
    key.qk, key.value, key.ff = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 14)  # type: ignore[union-attr]
    key.attention = OddAttention()  # type: ignore[union-attr]
    decoder.dim = 7
    with pytest.raises(
        InstallError,
        match="'strata.0.key.attention', which is OddAttention.* with D=7; allowed is .* an even D",
    ):
        change_of(decoder, HiddenParallel(), fake_mesh(rank=0, ranks=2), strategy="S5")


def test_refuses_to_work_without_a_mesh_and_with_too_many_ranks() -> None:
    decoder = Model(Case(dim=8)).decoder
    with pytest.raises(InstallError, match="S5 requires several devices, found no mesh"):
        change_of(decoder, HiddenParallel(), None, strategy="S5")
    with pytest.raises(
        InstallError, match="5 ranks on the model axis and D=8, which has 4 pairs of channels"
    ):
        change_of(decoder, HiddenParallel(), fake_mesh(rank=0, ranks=5), strategy="S5")
