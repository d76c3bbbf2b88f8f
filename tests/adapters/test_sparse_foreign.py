"""Claim: the likelihood of HiGLUE, which adds a small number to the probability of a zero, has a sparse form too.

`sparse` takes its place exactly, in value and gradients, and refuses the counts that it refuses; policy auto may choose
it for every copy of HiGLUE's decoder that counts. All of it holds too where distributions do not check their values,
which is a setting of the whole process: `torch.compile` turns it off when it is first used.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, NegativeBinomial

from lightning_amp._torch import values_are_checked
from lightning_amp.adapters.forms.adapted_decoder import GivenDistribution
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.techniques.checks import same_function
from lightning_amp.techniques.hic.scores.sparse_likelihood import sparse_likelihood
from tests.adapters.higlue_shaped import ZeroInflated
from tests.techniques.hic.scores.test_sparse_likelihood import arguments, assert_close, counts, forward_backward

LEAST = 1e-7


class Shifted(NegativeBinomial):
    """The same by a shift, as a newer generation has it: neither exponential overflows."""

    def __init__(self, zi_logits: Tensor, total_count: Tensor, logits: Tensor) -> None:
        super().__init__(total_count, logits=logits)
        self.zi_logits = zi_logits

    def log_prob(self, value: Tensor) -> Tensor:
        density, zi, small = super().log_prob(value), self.zi_logits, math.log(LEAST)
        shift = torch.maximum(density, zi).clamp(min=small).detach()
        terms = (density - shift).exp() + (zi - shift).exp() + (small - shift).exp()
        at_zero = shift + terms.log()
        return torch.where(value.abs() < LEAST, at_zero, density) - F.softplus(zi)


class Masked(ZeroInflated):
    """The same by masks, as an older generation has it."""

    def log_prob(self, value: Tensor) -> Tensor:
        density = NegativeBinomial.log_prob(self, value)
        found, zero = torch.empty_like(density), value.abs() < LEAST
        zi, others = self.zi_logits[zero], self.zi_logits[~zero]
        found[zero] = (density[zero].exp() + zi.exp() + LEAST).log() - F.softplus(zi)
        found[~zero] = density[~zero] - F.softplus(others)
        return found


class AlwaysChecked(ZeroInflated):
    """It checks its values whatever the process's setting is."""

    def __init__(self, zi_logits: Tensor, total_count: Tensor, logits: Tensor) -> None:
        super().__init__(zi_logits, total_count, logits)
        self._validate_args = True


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether distributions check their values; what was found out before with another setting is not known."""
    before = values_are_checked()
    monkeypatch.setattr(same_function, "_FOUND", {})
    Distribution.set_default_validate_args(request.param)
    yield request.param
    Distribution.set_default_validate_args(before)


KINDS = (ZeroInflated, Shifted, Masked)
FAR = {"rare zeros": (30.0, 3.0, -30.0), "nothing but zeros": (-30.0, 0.0, 12.0)}


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_likelihood_in_whose_place_it_is(kind: type, rows: int, checked: bool) -> None:
    leaf, x = GivenDistribution(kind), counts()
    sparse = sparse_likelihood(leaf)
    assert (sparse.least, sparse.whole) == (LEAST, (False, True))
    assert values_are_checked() is checked
    given = arguments(*x.shape, rows=rows)
    for form in (x, SparseCounts.from_dense(x)):
        assert_close(forward_backward(sparse, form, given), forward_backward(leaf, x, given))


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("count", [0.0, 3.0])
def test_equals_it_far_from_usual_numbers(name: str, count: float) -> None:
    x = torch.full((1, 1), count, dtype=torch.float64)
    given = [torch.full((1, 1), value, dtype=torch.float64, requires_grad=True) for value in FAR[name]]
    leaf = GivenDistribution(Shifted)
    assert_close(forward_backward(sparse_likelihood(leaf), x, given), forward_backward(leaf, x, given))


def forms(wrong: float) -> tuple[Tensor, SparseCounts]:
    """Counts with a wrong one among them, as a tensor and by entries."""
    x = counts()
    x[3, 5] = wrong
    return x, SparseCounts.from_dense(x)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("wrong", [0.5, -1.0, torch.nan])
@pytest.mark.parametrize("kind", [ZeroInflated, AlwaysChecked])
def test_refuses_the_counts_that_the_likelihood_refuses(kind: type, wrong: float) -> None:
    leaf, given = GivenDistribution(kind), arguments(7, 150, rows=1)
    sparse, (x, entries) = sparse_likelihood(leaf), forms(wrong)
    Distribution.set_default_validate_args(True)
    with pytest.raises(ValueError, match="within the support"):
        leaf(x, *given)
    for form in (x, entries):
        with pytest.raises(ModelError, match="allowed are whole numbers from 0: pass the counts as they"):
            sparse(form, *given)


@pytest.mark.usefixtures("checked")
def test_takes_the_counts_that_the_likelihood_takes() -> None:
    leaf, given = GivenDistribution(ZeroInflated), arguments(7, 150, rows=1)
    sparse, always = sparse_likelihood(leaf), sparse_likelihood(GivenDistribution(AlwaysChecked))
    Distribution.set_default_validate_args(False)
    for form in forms(0.5):
        assert_close(forward_backward(sparse, form, given), forward_backward(leaf, forms(0.5)[0], given))
        with pytest.raises(ModelError, match="allowed are whole numbers from 0"):
            always(form, *given)


class Twice(ZeroInflated):
    """The small number is added to what is no zero too."""

    def log_prob(self, value: Tensor) -> Tensor:
        return (super().log_prob(value).exp() + LEAST).log()


class Less(ZeroInflated):
    """The small number hangs on the mass of the additional zeros."""

    def log_prob(self, value: Tensor) -> Tensor:
        least, self.least = self.least, self.least * self.zi_logits.sigmoid()  # type: ignore[misc]
        found = super().log_prob(value)
        self.least = least
        return found


@pytest.mark.parametrize("kind", [Twice, Less])
def test_refuses_what_adds_it_elsewhere(kind: type) -> None:
    with pytest.raises(InstallError, match="which returns (value|gradient) .* for a small example"):
        sparse_likelihood(GivenDistribution(kind))


def test_a_leaf_of_ones_own_that_takes_fractions_goes_on_taking_them() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, log_mu: Tensor, log_theta: Tensor, zi_logits: Tensor) -> Tensor:
            given = Shifted(zi_logits.expand_as(log_mu), log_theta.exp(), log_mu - log_theta)
            given._validate_args = False
            return given.log_prob(x).sum()

    assert sparse_likelihood(Own()).whole == (False, False)
