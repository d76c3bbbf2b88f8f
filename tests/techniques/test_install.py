"""Claim: a plan's rules are installed all or not at all, on the modules they name, and can be undone."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import Installed, install, install_rules
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.hic.attention.install import ChunkedLocalAttention
from lightning_amp.techniques.hic.scores.s4_key_first import KeyFirst
from lightning_amp.techniques.put_methods import methods_put
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.planning.profiles import hic, profile, rna

ANCHORS, STRATA, DIM = 60, 4, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nodes = [list(range(ANCHORS - k)) for k in range(STRATA)]
        decoder = StratifiedDecoder(
            DIM, nodes, stratum_index=list(range(STRATA)), n_anchors=ANCHORS, n_batches=1, window=16
        )
        self.decoders = nn.ModuleDict({"hic": decoder})


def planned(strategies: str = "S1,S3,S4", devices: int = 1) -> Plan:
    made_for = describe(Model(), batch_size=5)
    data = profile(hic(anchors=ANCHORS, strata=STRATA), rna())
    return plan(data, devices=devices, strategies=strategies, batch_size=5, shape=made_for)


def step(model: Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    decoder = model.decoders["hic"]
    u = torch.randn(5, DIM, dtype=torch.float64)
    v = torch.randn(ANCHORS, DIM, dtype=torch.float64)
    x = torch.poisson(torch.rand(5, decoder.n_features, dtype=torch.float64))
    loss = decoder(u, v, batch=torch.zeros(5, dtype=torch.long), library=x.sum(1, keepdim=True) + 1, x=x)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_installed_modules_compute_the_same_with_the_same_parameters() -> None:
    model = Model().double()
    eager = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    installed = install(model, planned())
    strata = model.decoders["hic"].strata
    assert isinstance(strata[1].key.attention, ChunkedLocalAttention)
    assert all(isinstance(stratum.decode, KeyFirst) for stratum in strata)
    now = dict(model.named_parameters())
    assert list(now) == list(parameters)
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert list(model.state_dict()) == list(eager.state_dict())
    loss, gradients = step(model)
    expected, expected_gradients = step(eager)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-14)
    installed.undo()
    installed.undo()
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in eager.named_modules()}


def unchanged(model: Model, before: dict[str, nn.Module]) -> bool:
    return dict(model.named_modules()) == before


def test_a_rule_that_matches_nothing_leaves_the_module_as_it_was() -> None:
    model = Model()
    before = dict(model.named_modules())
    made = planned("S1,S3,S4")
    stray = replace(made.rules[-1], fqn="decoders.atac.decode")
    with pytest.raises(InstallError, match="S4 cannot change 'decoders.atac.decode', which matches no"):
        install(model, replace(made, rules=(*made.rules[:-1], stray)))
    assert unchanged(model, before)
    # two rules on one module are refused
    model = Model()
    made = planned("S1,S4")
    with pytest.raises(InstallError, match="two rules of the plan change 'decoders.hic.strata.0.decode'"):
        install(model, replace(made, rules=(*made.rules, made.rules[-1])))


def test_the_wide_layers_are_those_outside_the_decoder() -> None:
    model = Model()
    features = sum(len(stratum.feature_anchor) for stratum in model.decoders["hic"].strata)
    model.decoders["hic"].head = nn.Linear(features, 3)
    model.encoder = nn.Sequential(nn.Linear(features, 4), nn.Linear(4, features))
    shape = describe(model, batch_size=5)
    assert shape.wide_layers == ("encoder.0",)
    assert shape.wide_weight_bytes == 4 * 4 * features


class _Twice:
    """A forward that computes what the class's own does, twice over."""

    def __call__(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The class's own, added to itself."""
        return 2 * type(module).forward(module, x)


def test_a_forward_of_a_module_that_stays_is_set_copied_with_it_and_taken_back() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    x, installed = torch.ones(1, 3), Installed()
    plain = module(x)
    installed.apply("0", Change({}, forwards={"": _Twice()}), module, strategy="S6")
    assert torch.equal(module(x), 2 * plain)
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin[0].weight)
    assert torch.equal(twin(x), 2 * twin[0].bias[None]), "a copy runs its own parameters"
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), 2 * plain)
    installed.undo()
    assert torch.equal(module(x), plain)
    assert "forward" not in vars(module[0])


def test_a_forward_that_somebody_has_set_is_not_overwritten() -> None:
    module, installed = nn.Sequential(nn.Linear(3, 3)), Installed()
    module[0].forward = theirs = lambda x: x
    with pytest.raises(InstallError, match="S6 cannot change how '0' runs, whose `forward` is set on the"):
        installed.apply("0", Change({}, forwards={"": _Twice()}), module, strategy="S6")
    installed.undo()
    assert module[0].forward is theirs


def test_what_lies_in_some_modules_is_taken_out_with_its_forwards() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x, installed = torch.ones(1, 3), Installed()
    plain = module(x)
    for name in "01":
        installed.apply(name, Change({}, forwards={"": _Twice()}), module, strategy="S6")
    with installed.aside():
        assert torch.equal(module(x), plain)
    installed.take_out(["0"])
    assert [name for name in "01" if "forward" in vars(module[int(name)])] == ["1"]
    assert [one.fqn for one in installed.overridden] == ["1"]
    installed.undo()
    assert torch.equal(module(x), plain)


def test_a_pattern_of_blocks_is_for_the_outermost_modules_that_it_matches() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
    for spec, name in ((RecomputeBlock(), "recompute"), (ChunkBlock(budget_bytes=1), "chunk")):
        installed = install_rules(module, [Rule(fqn="blocks.*", spec=spec, strategy=name, why="")])
        assert [one.fqn for one in installed.overridden] == ["blocks.0", "blocks.1"]
        installed.undo()


def test_methods_are_put_back_where_one_cannot_be_put() -> None:
    first = nn.Linear(1, 1)

    def changed() -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        yield first, {"forward": abs}
        raise ValueError("the second has none")

    with pytest.raises(ValueError, match="the second"), methods_put(changed()):
        pass
    assert "forward" not in vars(first)
