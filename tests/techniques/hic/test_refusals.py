"""Claim: what shares a decoder refuses every part that it does not know, names it, and changes nothing."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.installing.install import change_of, install
from lightning_amp.models.decoders.stratified import Decode, StrataRegion
from lightning_amp.models.decoders.stratum import AllFeatures
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.techniques.hic.attention.install import fuse_attention
from tests.techniques.sharded_cases import TARGETS, Case, Model, fake_mesh, make_plan


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Clamped(Decode):
    def forward(self, u: Tensor, key: Tensor, nodes: Tensor) -> Tensor:
        return super().forward(u, key, nodes).clamp(-5, 5)


class Weighted(AllFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class DoubledFeatures(AllFeatures):
    def own(self, values: Tensor) -> Tensor:
        return 2 * values


class FailingFeatures(AllFeatures):
    def whole(self, values: Tensor) -> Tensor:
        raise ValueError("not here")


class Weights(StrataRegion):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1))


class Scaling(StrataRegion):
    def leave(self, total: Tensor) -> Tensor:
        return 2 * total


class Distant(LocalAttention):
    """Adds what the rest of the sequence is like."""

    def prepare(self, q: Tensor, k: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return super().prepare(q, k, values + values.mean(0))


class Narrow(LocalAttention):
    """Says that its buckets are smaller than they are."""

    def n_buckets(self, n: int) -> int:
        return -(-n // (self.window + 1))


class Failing(LocalAttention):
    def prepare(self, q: Tensor, k: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        raise ValueError("not here")


def with_child(path: str, child: Any, key: Any = "attention") -> nn.Module:
    """A model of 8 channels with another module in one place of its decoder."""
    model = Model(Case(dim=8, key=key))
    parent, _, name = path.rpartition(".")
    module = model.decoder.get_submodule(parent)
    if hasattr(module, name):
        delattr(module, name)
    if child is not None:
        setattr(module, name, child)
    return model


CONV, ATTENTION = "strata.1.key.pairs", "strata.1.key.attention"
REFUSED = [
    ("S2", "strata.1.features", Weighted(), "a leaf `features` that has the state ['weight']"),
    ("S2", "strata.1.features", DoubledFeatures(), "returns own tensor"),
    ("S2", "strata.0.features", FailingFeatures(), "stratum 0 has a leaf `features` that fails"),
    ("S2", "strata.0.features", None, "whose stratum 0 has features"),
    ("S2", "strata.1.feature_anchor", None, "stratum 1 has no buffer `feature_anchor`"),
    ("S2", "region", Weights(), "has the state ['table']"),
    ("S2", "region", Scaling(), "child `region` returns its arguments unchanged: False"),
    ("nodes", "strata.0.features", DoubledFeatures(), "that returns own tensor"),
    ("nodes", "strata.1.key", nn.Linear(8, 8), "allowed is a key that has no state"),
    ("nodes", "strata.1.key.prenorm", nn.BatchNorm1d(8), "BatchNorm1d"),
    ("nodes", ATTENTION, nn.Identity(), "'strata.1.key.attention' Identity(); allowed is attention"),
    ("nodes", ATTENTION, Distant(8, 5), "whose buckets depend on other buckets"),
    ("nodes", ATTENTION, Failing(8, 5), "fails on an example with ValueError: not"),
    ("nodes", ATTENTION, Narrow(8, 5), "with window=5; allowed is attention with buckets"),
    ("S5", "strata.1.key.qk", None, "'AttentionKey' with the children ['prenorm', "),
    ("S5", "strata.1.key.gain", nn.Parameter(torch.ones(8)), "the state ['gain']"),
    ("S5", "strata.2.key.value", Doubled(8, 8), "allowed is nn.Linear(8, 8)"),
    ("S5", "strata.1.key.prenorm", nn.LayerNorm((23, 8)), "allowed is nn.LayerNorm(8)"),
    ("S5", ATTENTION, nn.Identity(), "which is Identity() with D=8; allowed is attention"),
    ("S5", CONV, nn.Conv1d(8, 8, 2), "allowed is a depthwise nn.Conv1d of 8 channels"),
    ("S5", CONV, nn.Conv1d(8, 8, 2, groups=8, padding_mode="circular"), "padded with zeros"),
    ("S5", "strata.1.key.activation", nn.PReLU(8), "which is PReLU"),
    ("S5", "strata.0.decode", None, "'strata.0.decode', which is 'missing'"),
    ("S5", "strata.0.key", None, "'strata.0.key', which is 'missing'"),
    ("S5", "strata.0.decode", Clamped(), "which is Clamped"),
    ("S5", "strata.0.decode", nn.Bilinear(2, 2, 1), "has the state ['bias', 'weight']"),
    ("S5", "region", None, "whose child `region` is None"),
    ("S4", "strata.0.decode", nn.Identity(), "'Identity', which fails on a small example with TypeError"),
    ("S4", "strata.0.decode", nn.Bilinear(2, 2, 1), "has the state ['bias', 'weight']"),
    ("S4", "strata.0.decode", Clamped(), "'Clamped', which returns"),
    ("stream", "walk", nn.Identity(), "child `walk`"),
    ("stream", "walk", None, "child `walk` is None"),
    ("stream", "strata.1.sum_over_cells", nn.Identity(), "child `sum_over_cells`"),
    ("stream", "strata.1.sum_over_cells", None, "child `sum_over_cells` is None"),
    ("recompute", "walk", nn.Identity(), "child `walk`"),
]


@pytest.mark.parametrize(("technique", "path", "child", "message"), REFUSED)
def test_refuses_parts_that_compute_something_else(technique: str, path: str, child: Any, message: str) -> None:
    key = "convolution" if path == CONV or path.endswith("activation") else "attention"
    model = with_child(path, child, key)
    before = dict(model.named_modules())
    with pytest.raises(InstallError, match=f"(?s){technique} .*{re.escape(message)}"):
        install(model, make_plan((technique,), 2), fake_mesh(rank=0, ranks=2))
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("technique", ["S2", "S5", "nodes", "strata"])
def test_refuses_one_device_and_what_is_no_decoder_or_shared_already(technique: str) -> None:
    model, spec, mesh = Model(Case(dim=8)), TARGETS[technique][1], fake_mesh(rank=0, ranks=2)
    with pytest.raises(InstallError, match=f"{technique} requires several devices, found no mesh"):
        change_of(model.decoder, spec, None, strategy=technique)
    with pytest.raises(InstallError, match=f"{technique} does not support 'Linear', which is no decomposed"):
        change_of(nn.Linear(2, 2), spec, mesh, strategy=technique)
    install(model, make_plan((technique,), 2), mesh)
    with pytest.raises(InstallError, match="shared already|sharded before|split already|with window=None"):
        install(model, make_plan((technique,), 2), mesh)


PLACEMENTS = [("S2", "strata"), ("nodes", "S2"), ("nodes", "S5"), ("nodes", "strata"), ("S5", "strata")]


@pytest.mark.parametrize(("one", "other"), [*PLACEMENTS, *(pair[::-1] for pair in PLACEMENTS)])
def test_refuses_a_second_placement(one: str, other: str) -> None:
    """Two ways to split a decoder add up to another loss, without an error by themselves."""
    model, mesh = Model(Case()), fake_mesh(rank=0, ranks=2)
    install(model, make_plan((one,), 2), mesh)
    with pytest.raises(InstallError):
        install(model, make_plan((other,), 2), mesh)


@pytest.mark.parametrize(("technique", "case", "ranks", "message"), [
    ("S5", Case(dim=8), 5, "5 ranks on the model axis and D=8, which has 4 pairs of channels"),
    ("nodes", Case(key="convolution"), 2, "has 'strata.1.key' ConvolutionKey"),
    ("nodes", Case(anchors=9, window=3), 4, "N=9 anchors fill 3 buckets of 3"),
    ("nodes", Case(distances=(0,)), 2, r"has buckets of \[\] anchors; allowed is strata with attention"),
])  # fmt: skip
def test_refuses_sizes_that_cannot_be_shared(technique: str, case: Case, ranks: int, message: str) -> None:
    with pytest.raises(InstallError, match=f"(?s){technique} .*{message}"):
        install(Model(case), make_plan((technique,), ranks), fake_mesh(rank=0, ranks=ranks))


class Dropping(LocalAttention):
    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Tensor:
        return nn.functional.dropout(super().attend(state, first, last), 0.1, self.training)


class Stopping(LocalAttention):
    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        return super().forward(q, k.detach() + 0 * k, values)


class Alone(LocalAttention):
    """Another function where there is more than one bucket."""

    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        buckets = zip(*(x.split(self.window) for x in (q, k, values)), strict=True)
        return torch.cat([super(Alone, self).forward(*bucket) for bucket in buckets])


def with_attribute(name: str, value: object) -> LocalAttention:
    attention = LocalAttention(8, 5)
    setattr(attention, name, value)
    return attention


def hooked() -> LocalAttention:
    attention = LocalAttention(8, 5)
    attention.register_forward_hook(lambda module, args, out: None)
    return attention


@pytest.mark.parametrize(("attention", "found"), [
    (nn.Linear(2, 2), r"'Linear', which has the settings \['dim=None', 'window=None'\]"),
    (with_attribute("scale", nn.Parameter(torch.ones(1))), r"has the state \['scale'\]"),
    (with_attribute("drop", nn.Dropout(0.1)), r"has the children \['drop'\]"),
    (hooked(), r"has the hooks \['forward_hooks'\]"),
    (Dropping(8, 5), "returns output .* for a small example of 2 anchors with window=3"),
    (Stopping(8, 5), "returns gradient of k .* of 2 anchors"),
    (Alone(8, 100), "returns output .* of 12 anchors with window=3"),
])  # fmt: skip
def test_fused_attention_refuses_other_modules(attention: nn.Module, found: str) -> None:
    training, state = attention.training, torch.random.get_rng_state()
    with pytest.raises(InstallError, match=f"'fused' does not support .*{found}.*leave 'fused' out"):
        fuse_attention(attention)
    assert attention.training == training
    if not isinstance(attention, Dropping):
        assert torch.equal(torch.random.get_rng_state(), state)
