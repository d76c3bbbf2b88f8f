"""Log-probabilities are those of their distributions, sum to one, and stay finite at the extremes; keyed numbers are
functions of key, stream and column alone, and look random.
"""

import pytest
import torch
from torch.distributions import Bernoulli, LogNormal, NegativeBinomial, Normal

from lightning_amp.errors import ModelError
from lightning_amp.models.decoders import likelihoods
from lightning_amp.models.keyed_noise import KeyedDropout, keyed_normal, keyed_uniform

COUNTS = torch.arange(0, 6, dtype=torch.float64)
LOG_MU = torch.tensor([[-3.0], [0.0], [1.2]], dtype=torch.float64)
LOG_THETA = torch.tensor([[0.4], [-1.0], [2.0]], dtype=torch.float64)
ZI = torch.tensor([[-2.0], [0.0], [1.5]], dtype=torch.float64)


def test_nb_is_the_negative_binomial():
    expected = NegativeBinomial(total_count=LOG_THETA.exp(), logits=LOG_MU - LOG_THETA).log_prob(COUNTS)
    found = likelihoods.nb(COUNTS, LOG_MU, LOG_THETA)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_zinb_sums_to_one_and_mixes():
    counts = torch.arange(0, 5000, dtype=torch.float64)
    p = likelihoods.zinb(counts, LOG_MU, LOG_THETA, ZI).exp()
    torch.testing.assert_close(p.sum(1), torch.ones(3, dtype=torch.float64), rtol=1e-10, atol=0)
    expected = (1 - ZI.sigmoid()) * likelihoods.nb(counts, LOG_MU, LOG_THETA).exp()
    expected[:, 0] += ZI.sigmoid()[:, 0]
    torch.testing.assert_close(p, expected, rtol=1e-10, atol=1e-300)


def test_expected_is_the_mean_of_the_likelihood():
    counts = torch.arange(0, 20_000, dtype=torch.float64)
    p = likelihoods.zinb(counts, LOG_MU, LOG_THETA, ZI).exp()
    outputs = {name: likelihoods.predicted(name, LOG_MU.exp(), ZI) for name in ("expected", "mean", "dropout")}
    torch.testing.assert_close(outputs["expected"], (p * counts).sum(1, keepdim=True), rtol=1e-8, atol=0)
    torch.testing.assert_close(outputs["expected"], (1 - outputs["dropout"]) * outputs["mean"], rtol=1e-12, atol=0)
    without = {name: likelihoods.predicted(name, LOG_MU.exp(), None) for name in outputs}
    assert torch.equal(without["expected"], without["mean"])
    assert not without["dropout"].any()
    with pytest.raises(
        ModelError, match=r"output='median' is not supported; allowed are 'expected', 'mean', 'dropout'"
    ):
        likelihoods.predicted("median", LOG_MU.exp(), ZI)


@pytest.mark.parametrize("modality", ["rna", "atac", "methyl"])
def test_a_decoder_predicts_what_its_likelihood_expects(modality):
    torch.manual_seed(0)
    decoder = likelihoods.PlainDecoder(modality, 3, 2).double()
    for table in decoder.parameters():
        torch.nn.init.normal_(table, std=0.5)
    cells = {"batch": torch.tensor([0, 1]), "library": torch.tensor([[9.0], [4.0]], dtype=torch.float64)}
    u, v = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    # numbers of x times their probability: all counts, or a fine grid of values (their density at 0 is a mass of x = 0)
    x = torch.arange(0, 3000, dtype=torch.float64) if decoder.counts else torch.logspace(-9, 9, 20_001).double()
    tables = [getattr(decoder, name)[cells["batch"]][..., None] for name in decoder.tables]
    location = decoder._location(u, v, **cells)[..., None]
    p = decoder.likelihood(x, location, *tables).exp() * x
    found = p.sum(-1) if decoder.counts else torch.trapezoid(p, x)
    torch.testing.assert_close(decoder.predicted(u, v, **cells), found, rtol=1e-4, atol=0)


def test_normal():
    x = torch.tensor([-1.0, 0.0, 2.5], dtype=torch.float64)
    density = Normal(LOG_MU, LOG_THETA.exp())
    torch.testing.assert_close(likelihoods.normal(x, LOG_MU, LOG_THETA), density.log_prob(x), rtol=1e-12, atol=0)


def test_ziln():
    x = torch.tensor([0.0, 0.3, 2.5], dtype=torch.float64)
    p = (1 - ZI.sigmoid()) * LogNormal(LOG_MU, LOG_THETA.exp()).log_prob(x.clamp_min(0.1)).exp()
    p[:, :1] = ZI.sigmoid()
    torch.testing.assert_close(likelihoods.ziln(x, LOG_MU, LOG_THETA, ZI), p.log(), rtol=1e-12, atol=1e-14)


def test_bernoulli():
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        likelihoods.bernoulli(x, ZI), Bernoulli(logits=ZI).log_prob(x.expand(3, 2)), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0.0, 1.0, 400.0])
@pytest.mark.parametrize(
    ("log_mu", "log_theta", "zi"),
    [(-300.0, 0.0, 0.0), (0.0, 20.0, 0.0), (0.0, -40.0, 0.0), (20.0, 0.0, 90.0), (0.0, 0.0, -90.0)],
    ids=["no mean", "Poisson limit", "no theta", "always inflated", "never inflated"],
)
def test_zinb_is_finite_at_the_extremes(dtype, count, log_mu, log_theta, zi):
    arguments = [torch.tensor(v, dtype=dtype, requires_grad=True) for v in (log_mu, log_theta, zi)]
    value = likelihoods.zinb(torch.tensor(count, dtype=dtype), *arguments)
    gradients = torch.autograd.grad(value, arguments)
    assert torch.isfinite(torch.stack((value, *gradients))).all()


def test_large_logits_keep_their_digits():
    # torch.softplus turns into the identity above 20, which is off by 1e-9 here
    zi, one = torch.tensor(20.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    excess = likelihoods.zinb(one, one, one, zi) - likelihoods.nb(one, one, one) + zi
    assert excess.item() == pytest.approx(-torch.log1p((-zi).exp()).item(), rel=1e-4)


KEYS = torch.arange(20_000) * 97 + 5


def test_known_values():
    # the numbers of a stored run must not change with the code: these are fixed for good
    found = keyed_uniform(torch.tensor([0, 1, 2**31 - 1]), 2, stream=3)
    expected = torch.tensor(
        [
            [0.49986428022384644, 0.7196202874183655],
            [0.9822743535041809, 0.08112186193466187],
            [0.7407624125480652, 0.16769284009933472],
        ]
    )
    assert torch.equal(found, expected)


def test_a_row_depends_on_its_key_only():
    whole = keyed_normal(KEYS, 7, stream=1)
    order = torch.randperm(len(KEYS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_normal(KEYS[order], 7, stream=1), whole[order])
    assert torch.equal(keyed_normal(KEYS[:3], 4, stream=1), whole[:3, :4])


def test_dropout_by_key():
    x, draw = torch.ones(2000, 50), torch.arange(2000)
    layer = KeyedDropout(0.2, stream=0)
    dropped = layer(x, draw)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert abs(dropped.mean() - 1) < 1e-2
    assert torch.equal(dropped[7:9], layer(x[:2], draw[7:9]))
    assert not torch.equal(dropped, KeyedDropout(0.2, stream=1)(x, draw))
    assert torch.equal(layer.eval()(x, draw), x)
