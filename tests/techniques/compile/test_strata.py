"""Claim: compiled strata train as the eager decoder does, whatever techniques they have, and are never eager unsaid."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import overrides_of
from lightning_amp.installing.install import install
from lightning_amp.techniques.compile import strata as technique
from lightning_amp.techniques.compile.row import CompileStrata
from lightning_amp.techniques.compile.strata import AsItIs, Compiled, compile_strata
from lightning_amp.techniques.hic.rows import StreamStrata
from tests.adapters import foreign_cases
from tests.adapters.higlue_shaped import Copy
from tests.models import unit_cases
from tests.techniques.sharded_cases import Case, Model, assert_same, make_plan, reference, train

# torch's own, of what it looks at while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
TWO = Case(distances=(1, 3))
FIVE = Case(distances=(0, 1, 3, 4, 5))
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "S4, sdpa, sparse": (FIVE, ("S4", "sdpa", "sparse")),
    "all": (FIVE, ("S4", "fused", "sparse", "stream")),
    "all, one row, chained": (replace(FIVE, chained=True, n_batches=1, variant="paper"), ("fused", "sparse", "stream")),
    "recompute, binarized": (replace(FIVE, binarized=True, chained=True), ("S4", "fused", "recompute")),
}  # fmt: skip


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of it is tested by itself."""
    monkeypatch.setattr(technique, "_check_compiler", lambda device: None)


def installed(case: Case, strategies: tuple[str, ...], *, cells: int = 3) -> Model:
    model = Model(case)
    install(model, make_plan((*strategies, "compile"), 1, {"stream": StreamStrata(cells=cells)}))
    return model


def graphs(run: Callable[[], object]) -> int:
    """How many were compiled meanwhile."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch.compiler.reset()
    run()
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.exhaustive
@pytest.mark.release
def test_equals_the_eager_decoder(compiler: None) -> None:
    model = installed(TWO, ("S4", "fused", "sparse"))
    found = {}
    # of both strata the key before and after attention, with gradients and without, and what is around the likelihood
    assert graphs(lambda: found.update(train(model, 3))) == 6
    assert_same(found, reference(TWO))


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sparse_counts", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_eager_decoder_beside_others(name: str, sparse_counts: bool, compiler: None) -> None:
    case, strategies = CASES[name]
    for cells in (3, 9) if "stream" in strategies else (3,):
        model = installed(case, strategies, cells=cells)
        if sparse_counts:
            model.batch["x"] = SparseCounts.from_dense(model.batch["x"])
        assert_same(train(model, 3), reference(case))


@pytest.mark.exhaustive
@pytest.mark.release
def test_decoders_and_units_written_elsewhere() -> None:
    for make, batches in (
        (unit_cases.Counts, unit_cases.batches()),
        (lambda: foreign_cases.Foreign(Copy()), foreign_cases.batches(Copy())),
    ):
        expected = foreign_cases.trained(make(), batches, None)
        found = foreign_cases.trained(make(), batches, "S1,stream,compile")
        assert foreign_cases.differences(found, expected) <= 1e-10


class Scaled(nn.Module):
    """A stratum's part whose graph depends on a number."""

    factor = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.long
def test_too_many_graphs_are_an_error() -> None:
    # where a graph has to be whole, torch itself says so
    run, module, x = Compiled("default", dynamic=False, whole=False, graphs=1), Scaled(), torch.ones(2)
    assert graphs(lambda: run(module, x)) == 1
    module.factor = 2
    with pytest.raises(Exception, match="recompile_limit"):
        run(module, x)


def test_a_simulation_compiles_nothing() -> None:
    run = Compiled("no such mode", dynamic=False, whole=True, graphs=1)
    assert run(Scaled(), torch.ones(2, device="meta")).is_meta


def test_copies(compiler: None) -> None:
    model = installed(TWO, ("fused", "sparse"))
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    key = again.decoder.strata[0].key
    (of_key,), (of_attention,) = overrides_of(key), overrides_of(key.attention)
    assert isinstance(of_key.run, Compiled)
    assert isinstance(of_attention.run, AsItIs)
    assert not of_key.run.whole
    assert again.decoder.strata[0].likelihood.forward.args == (again.decoder.strata[0].likelihood,)


def test_refuses_to_train_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object, **options: object) -> object:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(InstallError, match=r"an addition: No working C\+\+ compiler found; .* leave"):
        installed(TWO, ())


@pytest.mark.parametrize(
    ("mode", "message"),
    [("max-autotune", "allowed are 'default', 'reduce-overhead'"), ("reduce-overhead", "on a device of type 'cpu'")],
)
def test_refuses_modes(mode: str, message: str, compiler: None) -> None:
    with pytest.raises(InstallError, match=message):
        compile_strata(Model(TWO).decoder, CompileStrata(mode=mode), None)


@pytest.mark.parametrize("strategy", ["stream", "recompute"])
def test_refuses_graphs_over_what_comes_between_strata(strategy: str) -> None:
    model = Model(TWO)
    install(model, make_plan((strategy,), 1))
    with pytest.raises(InstallError, match="runs a backward pass between strata; set mode='default'"):
        technique._check_mode("reduce-overhead", torch.device("cuda"), model.decoder)
    technique._check_mode("reduce-overhead", torch.device("cuda"), Model(TWO).decoder)


def test_refuses_strata_whose_likelihood_it_cannot_find(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(TWO)
    monkeypatch.setattr(type(model.decoder.strata[0]), "nll", None)
    with pytest.raises(InstallError, match="'Stratum', which has no method `nll`"):
        compile_strata(model.decoder, CompileStrata(), None)
