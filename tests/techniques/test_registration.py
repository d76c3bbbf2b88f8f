"""Signals and techniques from outside are diagnosed, planned, written, installed and refused as the paper's are."""

import copy
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp import diagnosis as signals
from lightning_amp.diagnosis import HEAVY_DECOMPOSITION, register_signal
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.installing.install import install
from lightning_amp.models.latents import Encoder
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.register_technique import register_technique
from lightning_amp.techniques.table import STRATEGIES, parse_strategies
from tests.paths import EXAMPLES
from tests.planning.profiles import hic, profile, rna

EXAMPLE = EXAMPLES / "own_technique.py"
FEATURES = 90
SPARSE = profile(replace(hic(anchors=60, strata=4), nonzero=1000), rna())
"""400 x 234 counts of which 1,000 are not zero."""
paper = partial(plan, policy="paper")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Give the next test the library that this one found."""
    tables: tuple[dict[str, Any], ...] = (STRATEGIES, signals.FROM_OUTSIDE)
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, imported for the first time."""
    spec = importlib.util.spec_from_file_location("own_technique", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_technique", module)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Split:
    """A spec with a setting."""

    parts: int = 2


def technique(strategy: str = "S7", **changes: Any) -> None:
    """Register a technique that changes nothing."""
    settings = {
        "title": "split",
        "shrinks": "[B, F] to [B, F / 2]",
        "spec": Split,
        "targets": lambda shape: [("encoders.hic.first", Split(parts=3))],
        "install": lambda module, spec, mesh: module,
    }
    register_technique(strategy, **(settings | changes))


class Model(nn.Module):
    """An encoder under the name that the reference model gives it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"hidden_dim": 6, "hidden_depth": 2, "dropout": 0.0, "total": 1e4, "stream": 0}
        self.encoders = nn.ModuleDict({"hic": Encoder(FEATURES, 4, **sizes)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loc, std = self.encoders["hic"](x, x.sum(1, keepdim=True) + 1)
        return (loc.square() + std).sum()


def sparse_counts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.poisson(torch.full((7, FEATURES), 0.05, dtype=torch.float64), generator=generator)
    x[2] = 0
    assert 0 < (x != 0).sum() < 0.1 * x.numel()
    return x


# --- the example ---


def test_the_raised_signal_adds_its_technique_with_its_evidence_and_its_savings(own: ModuleType) -> None:
    made = paper(SPARSE, devices=2, device_memory="24GiB", batch_size=256)
    assert made.strategies == ("S1", "S6")
    assert "SPARSE_INPUT" in made.signals
    assert made.evidence[-1] == "SPARSE_INPUT: 98.9% of the Hi-C counts are zero (from 95%)"
    rule = made.rules[-1]
    assert (rule.fqn, rule.strategy) == ("encoders.hic.first", "S6")
    assert rule.spec == own.SparseInput()
    assert rule.why == made.evidence[-1]
    plain = plan(SPARSE, devices=2, strategies="S1", batch_size=256)
    saved = plain.predicted_base_bytes - made.predicted_base_bytes
    assert saved == 256 * 234 * (4 - 1) == rule.saves_bytes
    assert made.predicted_peak_bytes == plain.predicted_peak_bytes - saved
    text = " ".join(plan_report(made).split())
    assert "S1 data parallel, S6 sparse input" in text
    assert "S6 SparseInput" in text
    assert max(map(len, plan_report(made).splitlines())) <= 80
    assert not any("does not count" in note for note in made.notes)


def test_a_plan_with_it_survives_json_where_it_is_registered(own: ModuleType) -> None:
    technique()
    made = plan(SPARSE, devices=2, strategies="S1,S3,S6,S7")
    text = made.to_json()
    assert Plan.from_json(text) == made
    assert json.loads(text)["rules"][-1]["spec"] == {"type": "Split", "parts": 3}
    del STRATEGIES["S7"]
    with pytest.raises(PlanError, match=r"'Split'; this version knows .* import that package before"):
        Plan.from_json(text)
    assert "S7 (not registered here)" in plan_report(made)
    with pytest.raises(PlanError, match=r"strategies=\['S7'\] are not of S1.*S6 \(a package that registers"):
        replace(made, notes=())


def test_the_technique_is_exact_and_owns_the_same_parameters(own: ModuleType) -> None:
    eager, model, x = Model().double(), Model().double(), sparse_counts()
    parameters = dict(model.named_parameters())
    installed = install(model, paper(SPARSE, devices=1))
    assert type(model.encoders["hic"].first) is own.SparseLinear
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    assert list(model.state_dict()) == list(eager.state_dict())
    losses = []
    for one in (eager, model):
        optimizer = torch.optim.RMSprop(one.parameters(), lr=1e-3)
        losses.append(one(x))
        losses[-1].backward()
        optimizer.step()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for name, p in eager.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(parameters[name].grad, p.grad, rtol=1e-10, atol=1e-13, msg=name)
        torch.testing.assert_close(parameters[name], p, rtol=1e-9, atol=1e-12, msg=name)
    installed.undo()
    assert type(model.encoders["hic"].first) is nn.Linear


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_the_example_trains_with_it(own: ModuleType, tmp_path, caplog, monkeypatch) -> None:
    calls = []
    forward = own.SparseLinear.forward
    monkeypatch.setattr(own.SparseLinear, "forward", lambda self, x: calls.append(len(x)) or forward(self, x))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        own.train(tmp_path, devices=1)
    assert "S6 sparse input" in caplog.text
    assert len(calls) > 2


# --- what may be registered ---


def test_names_are_taken_once(own: ModuleType) -> None:
    with pytest.raises(PlanError, match="'SPARSE_INPUT', which is registered already; choose a name other than"):
        register_signal("SPARSE_INPUT", own.look_for_zeros)
    with pytest.raises(PlanError, match="'HEAVY_DECOMPOSITION', which is registered already"):
        register_signal(HEAVY_DECOMPOSITION, own.look_for_zeros)
    with pytest.raises(PlanError, match="as 'S6', which is 'sparse input' already; choose a number other than"):
        technique("S6")
    with pytest.raises(PlanError, match="as 'S2', which is 'feature parallel' already"):
        technique("S2")
    with pytest.raises(PlanError, match="spec=SparseInput, the name of another spec"):
        technique("S7", spec=own.SparseInput)


@dataclass
class Thawed:
    """Not frozen."""


@dataclass(frozen=True)
class Tagged:
    """Its field is the tag of a plan's JSON."""

    type: int = 0


@dataclass(frozen=True)
class Derived:
    """Its field cannot be given."""

    parts: int = field(init=False, default=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "S06"}, "registered as 'S06'; allowed is S and a number, such as 'S6'"),
        ({"strategy": 7}, "registered as 7; allowed is S and a number"),
        ({"signal": "MY_SIGNAL"}, "signal='MY_SIGNAL'; known are HIGH_INPUT.* and None: register a signal of"),
        ({"spec": Thawed}, r"Thawed'>; allowed is a class made with @dataclass\(frozen=True\)"),
        ({"spec": int}, "spec=<class 'int'>; allowed is a class made with"),
        ({"spec": Split()}, r"spec=Split\(parts=2\); allowed is a class made with"),
        ({"spec": Tagged}, r"spec=Tagged, whose fields \['type'\] cannot be read back"),
        ({"spec": Derived}, r"spec=Derived, whose fields \['parts'\] cannot be read back"),
    ],
)
def test_what_cannot_be_a_technique_is_refused_and_not_kept(changes, message) -> None:
    before = dict(STRATEGIES)
    with pytest.raises(PlanError, match=message):
        technique(**changes)
    assert before == STRATEGIES


def test_what_cannot_be_a_signal_is_refused() -> None:
    for name in ("my signal", "", "A: B", 3):
        with pytest.raises(PlanError, match="allowed are capitals, digits and _"):
            register_signal(name, lambda profile: (True, "always"))
    with pytest.raises(PlanError, match="detect=None; allowed is a function"):
        register_signal("MY_SIGNAL", None)
    assert signals.FROM_OUTSIDE == {}


# --- what its functions return ---


def test_a_technique_of_the_model_axis_gets_one() -> None:
    ranks = []
    technique(
        "S10",
        signal=HEAVY_DECOMPOSITION,
        model_axis=True,
        shape_after=lambda shape, model_ranks: ranks.append(model_ranks) or shape,
    )
    assert paper(SPARSE, devices=4).mesh == MeshShape(data=1, model=4)
    assert set(ranks) == {4}
    assert paper(SPARSE, devices=4, model_parallel_size=2).mesh == MeshShape(data=2, model=2)
    found = plan(SPARSE, devices=4).candidates
    assert {(c.data, c.model, "S10" in c.strategies) for c in found} == {(1, 4, True), (2, 2, True)}
    alone = paper(SPARSE, devices=1)
    assert alone.strategies == ()
    assert "S10 is left out: it splits over the model axis, which one device has not" in alone.notes
    assert parse_strategies("S10,S2") == ("S1", "S2", "S10")


# --- what is installed ---


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda old: None, "the technique of S7 returned None for 'encoders.hic.first'; allowed are a module and"),
        (copy.deepcopy, r"own the same parameters: \['bias', 'weight'\] differ"),
        (lambda old: nn.Identity(), r"'Identity' cannot replace 'encoders.hic.first'.* \['bias', 'weight'\]"),
        (lambda old: Change({"inner": old}), "replace 'encoders.hic.first.inner', which is no module"),
    ],
)
def test_a_replacement_that_owns_other_parameters_is_refused(made, message) -> None:
    technique(install=lambda module, spec, mesh: made(module))
    model = Model()
    before = dict(model.named_modules())
    with pytest.raises(InstallError, match=message):
        install(model, plan(SPARSE, devices=1, strategies="S7"))
    assert dict(model.named_modules()) == before
