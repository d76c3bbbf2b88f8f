"""Claim: a decoder of HiGLUE's shape, written elsewhere, computes the same under every plan with nothing edited.

Two ranks train once under every placement and every way of keeping activations, and report how far they are from one
device.

Claim: a v with more rows than a decoder's features have anchors is planned for.

HiGLUE's index of anchors leaves entries of -1 with more than 10 strata, so that its v is longer than the features say.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, NegativeBinomial
from torch.utils.data import DataLoader

from lightning_amp.adapters.adapt import adapt
from lightning_amp.adapters.forms.adapted_decoder import AdaptedDecoder
from lightning_amp.adapters.lazy_distribution import LazyDistribution, LazyLogProb
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.installing.describe_decoder import with_unsupported
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.decoders.stratum import ZINB
from lightning_amp.techniques.contract.protocol import find_decoders
from tests.adapters import foreign_cases
from tests.adapters.foreign_cases import COUNTED, Plain, counted, everything, example, fit, trained
from tests.adapters.higlue_shaped import Copy, Foreign, cells
from tests.each import FEW
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.ranks import run_ranks
from tests.techniques.sharded_cases import make_plan

BASE = Copy()
COPIES = {
    "independent": BASE,
    "chained": replace(BASE, chained=True),
    "paper": replace(BASE, projected=True, residual=False, postnorm=False, chained=True),
    "projected": replace(BASE, projected=True),
    "no postnorm": replace(BASE, postnorm=False),
    "nothing added": replace(BASE, least=0.0, least_zero=0.0),
    "no head": replace(BASE, head=False),
    "no weights": replace(BASE, head=False, weights=False),
    "one experiment": replace(BASE, experiments=1),
    "other lists": replace(BASE, anchors_first=False),
    "binary": replace(BASE, binarize=True),
    "convolution": replace(BASE, attention=False),
    "plain convolution": replace(BASE, attention=False, activation=False, bias=False),
    "centred convolution": replace(BASE, attention=False, centred=True),
    "longer v": replace(BASE, strata=3, more_rows=12),
}
ON_TWO = {name: COPIES[name] for name in ("chained", "centred convolution", "longer v")}
RTOL = 1e-9

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture(scope="module", params=FEW)
def few(request: Any) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def on_two_ranks(few: bool, tmp_path_factory: Any) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, tmp_path_factory.mktemp("two"), ON_TWO, few, timeout=400)


def results(given: Any, inputs: list[Tensor], x: Tensor) -> list[Tensor]:
    total = given.log_prob(x).mean()
    return [total, *torch.autograd.grad(total, inputs, allow_unused=True)]


@pytest.mark.long
def test_ours_computes_what_the_copy_computes() -> None:
    for name, kind in COPIES.items():
        module, given, x = example(kind)
        keys = list(module.state_dict())
        found = adapt(module)
        assert list(found.decoders) == ["decoder"], found.notes
        assert list(module.state_dict()) == keys
        ours = find_decoders(module)["decoder"]
        assert isinstance(ours, AdaptedDecoder)
        assert ours.chained is kind.chained
        assert isinstance(ours.strata[0].likelihood, ZINB) is (name == "nothing added")
        shape = with_unsupported(module, describe(module, batch_size=4)).decoder
        assert shape is not None
        assert ("sparse" in shape.unsupported) is kind.binarize
        inputs = [given[0], given[1], given[3], *module.decoder.parameters()]
        new = results(module.decoder(*given), inputs, x)
        found.undo()
        old = results(module.decoder(*given), inputs, x)
        for a, b in zip(new, old, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).norm() <= 1e-10 * b.norm()


@pytest.mark.exhaustive
def test_every_plan_on_two_ranks_trains_as_one_device(on_two_ranks: Any, few: bool) -> None:
    for found in (rank["plans"] for rank in on_two_ranks):
        assert len(found) == (7 if few else 19)
        assert {key: far for key, far in found.items() if not far <= RTOL} == {}


@pytest.mark.ranks
def test_two_ranks_count_the_step_and_train_as_one_device(tmp_path: Path) -> None:
    for found in run_ranks(counted, 2, tmp_path, COPIES["chained"]):
        assert list(found) == list(COUNTED)
        assert all(far <= RTOL and known for far, known in found.values()), found


class Told(Foreign):
    """Whose decoder nobody recognises."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.decoder.attn_layers[0].register_forward_hook(lambda *_: None)


@pytest.mark.full
@pytest.mark.long
def test_what_is_not_detected_trains_under_s1_and_the_plan_says_so() -> None:
    batches = foreign_cases.batches(BASE)[:3]
    expected = trained(Told(BASE), batches, None)
    strategy = AMPStrategy()
    fit(Told(BASE), batches, strategy)
    assert strategy.plan is not None
    assert not {rule.strategy for rule in strategy.plan.rules} - {"S1"}
    assert any("trained as any other module (S1)" in note for note in strategy.plan.notes)
    assert foreign_cases.differences(trained(Told(BASE), batches, "S1"), expected) == 0
    with pytest.raises(PlanError, match="none was detected.*because it has hooks on modules of"):
        fit(Told(BASE), batches, AMPStrategy(strategies=["S1", "stream"]))


@pytest.mark.long
def test_its_forward_comes_back_after_the_run_and_where_nothing_was_installed() -> None:
    module, batches = Foreign(BASE), foreign_cases.batches(BASE)[:2]
    trained(module, batches, "S1,stream")
    assert "forward" not in vars(module.decoder)
    convolution = Foreign(COPIES["convolution"])
    with pytest.raises(PlanError, match="without attention"):
        fit(convolution, batches, AMPStrategy(strategies=["S1", "S3"]))
    assert "forward" not in vars(convolution.decoder)
    found = adapt(module)
    found.keep(["encoder.0", "decoders.hic.region"])
    assert "forward" not in vars(module.decoder)
    found = adapt(module)
    found.keep(["decoder.walk"])
    assert "forward" in vars(module.decoder)
    found.undo()
    found.undo()
    assert "forward" not in vars(module.decoder)


def test_a_stream_hands_a_stratum_its_own_columns_of_the_tables() -> None:
    module, given, x = example(BASE)
    adapt(module)
    ours: Any = find_decoders(module)["decoder"]
    plan = make_plan(["stream"], 1)
    install(module, plan)
    seen: list[int] = []
    for stratum in ours.strata:
        stratum.register_forward_pre_hook(lambda s, _: seen.append(s.log_theta.shape[1]))
    total = module.decoder(*given).log_prob(x).sum()
    assert seen == [len(rows) for rows in BASE.nodes()]
    (grad,) = torch.autograd.grad(total, [module.decoder.log_theta])
    assert grad.shape == module.decoder.log_theta.shape
    assert (grad != 0).all()


@pytest.mark.parametrize("kind", [BASE, COPIES["binary"]], ids=["counts", "binary"])
def test_the_distribution_behaves_as_that_of_the_copy(kind: Copy) -> None:
    module, given, x = example(kind)
    eager = module.decoder(*given)
    log_prob = eager.log_prob(x)
    adapt(module)
    new = module.decoder(*given)
    assert type(new) is LazyDistribution
    assert isinstance(new, Bernoulli if kind.binarize else NegativeBinomial)
    lazy = new.log_prob(x)
    assert (lazy.shape, lazy.numel(), lazy.dim(), lazy.size(1)) == (x.shape, x.numel(), 2, x.shape[1])
    two = torch.tensor(2.0, dtype=torch.float64)
    waiting = [(lazy, log_prob), (-lazy, -log_prob), (torch.neg(lazy), -log_prob), (torch.neg(-lazy), log_prob)]
    for a, b in waiting:
        assert isinstance(a, LazyLogProb)
        torch.testing.assert_close((a.mean(), a.sum()), (b.mean(), b.sum()), rtol=1e-12, atol=0)
        torch.testing.assert_close((torch.mean(a), torch.sum(a)), (b.mean(), b.sum()), rtol=1e-12, atol=0)
    with torch.no_grad():
        for a, b in [
            (lazy[0], log_prob[0]),
            (lazy.sum(1), log_prob.sum(1)),
            (torch.mean(lazy, dim=0), log_prob.mean(0)),
            (lazy + 1, log_prob + 1),
            (1 - lazy, 1 - log_prob),
            (lazy * x, log_prob * x),
            ((2 * lazy).mean(), (2 * log_prob).mean()),
            (torch.mul(lazy, 2), 2 * log_prob),
            (torch.div(lazy, two), log_prob / two),
            (x / lazy, x / log_prob),
            (torch.exp(-lazy), torch.exp(-log_prob)),
            (torch.stack([lazy, 2 * lazy]), torch.stack([log_prob, 2 * log_prob])),
            ((2 * lazy).exp(), (2 * log_prob).exp()),
            (new.mean, eager.mean),
            (new.logits, eager.logits),
            (new.log_prob(x[:1]), eager.log_prob(x[:1])),
        ]:
            assert torch.equal(a, b)
        assert new.sample((2,)).shape == (2, *x.shape)


def test_what_is_computed_in_full_with_gradients_is_said_and_exact() -> None:
    module, given, x = example(BASE)
    expected = torch.autograd.grad(module.decoder(*given).log_prob(x).sum(1).square().sum(), given[0])[0]
    adapt(module)
    with pytest.warns(UserWarning, match=r"'sum' was taken, requires gradients.*own forward"):
        found = module.decoder(*given).log_prob(x).sum(1).square().sum()
    assert torch.equal(torch.autograd.grad(found, given[0])[0], expected)


@pytest.mark.exhaustive
def test_a_decoder_of_own_units_is_dealt_to_ranks(on_two_ranks: Any) -> None:
    for found in (rank["units"] for rank in on_two_ranks):
        assert list(found) == ["S1,strata", "S1,stream,strata"]
        assert max(found.values()) <= RTOL


@pytest.mark.exhaustive
def test_where_ranks_share_the_strata_the_rest_is_exact_or_refused(on_two_ranks: Any) -> None:
    for found in (rank["in full"] for rank in on_two_ranks):
        for placement in ("S2", "strata", "nodes", "S5"):
            log_prob, mean, shape = found[placement]
            assert log_prob <= 1e-10
            assert mean <= 1e-10
            assert shape
            refused = found[f"{placement} refuses"]
            assert "requires gradients" in refused
            assert "allowed are log_prob(x).mean()" in refused
        assert "23 anchors, and v has 24 rows" in found["anchors"]


def test_a_library_of_another_shape_is_refused() -> None:
    module, (u, v, b, l), _ = example(BASE)  # noqa: E741
    adapt(module)
    for wrong in (None, l[:, 0], l[:1]):
        with pytest.raises(AmpError, match=r"called with l=.*allowed is the library size of every cell"):
            module.decoder(u, v, b, wrong)


LARGE = Copy(anchors=400, more_rows=800, strata=12, dim=32, window=40, experiments=1)


def peaks(module: Any, strategy: AMPStrategy) -> tuple[int, int]:
    """Predicted and measured bytes of the second step."""
    counts = cells(LARGE, 24)
    rows = [{n: t[i].float() if t.is_floating_point() else t[i] for n, t in counts.items()} for i in range(24)]
    monitor = StratumMemoryMonitor(plot=False)
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    trainer_of(strategy, callbacks=[monitor]).fit(module, loader)
    row = next(row for row in monitor.rows if row["stratum"] == "step")
    return row["predicted_bytes"], row["peak_bytes"]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("strategies", [["S1", "fused"], ["S1", "stream"], None], ids=str)
def test_the_prediction_is_for_the_rows_that_v_has(
    strategies: list[str] | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = AMPStrategy(strategies=strategies)
    # v is three times as long as the features say
    predicted, measured = peaks(Plain(LARGE).float(), strategy)
    assert strategy.plan is not None
    assert predicted == strategy.plan.predicted_peak_bytes
    assert any("v has 1200 rows, where the decoder's features have 400 anchors" in n for n in strategy.plan.notes)
    assert predicted == pytest.approx(measured, rel=0.05)
