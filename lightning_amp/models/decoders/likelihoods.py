"""Define log-probabilities of observed values, and PlainDecoder for RNA, ATAC and methylation.

Count distributions take log mean and log inverse dispersion, because means are softmax fractions that underflow.
Zero-inflated densities add mass and density at zero, log(pi + (1 - pi) p(0)), as the GLUE family does; the
log-normal one has no density at zero, so zero has probability pi.

    linear = softplus(scale) u v^T + bias
    counts (NB, ZINB)                 mean softmax(linear) * library, inverse dispersion exp(log_theta)
    values (ZILN)                     location linear, deviation exp(log_scale)
    loss = - mean over all cells and features of log p(x)

What a decoder predicts of a value (`Output`), with pi = sigmoid(zi_logits), or 0 without zero inflation:

    mean       exp(log_mu) of counts, exp(loc + exp(2 log_scale) / 2) of ZILN
    dropout    pi
    expected   (1 - pi) mean, the mean of the likelihood: what the data are on average

scale, bias and the tables of a likelihood have one row per experimental batch.
Known limit: in float32 nb of x > 0 loses digits for inverse dispersions above 1e4 (a difference of two lgamma).
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.shapes import Counts, Experiment, Library, PerCell, Scalar

FIRST_LOG_THETA, FIRST_ZI_LOGIT = 1.5, -2.0
"""Initial values of the tables. RMSprop changes an entry by about the learning rate per step: from 0 and 0 (variance
mu + mu^2, zero inflation 1/2), counts would say little about their mean for hundreds of steps, so that
modalities align late and often wrongly."""

Numbers = Float[Tensor, "*#shape"]
"""Tensors that broadcast with each other."""

Output = Literal["expected", "mean", "dropout"]
"""What a decoder predicts of every value: the mean of its likelihood, the same without zero inflation, or the
probability of an additional zero."""

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def _softplus(x: Tensor) -> Tensor:
    # not F.softplus: it is the identity above 20, an error of 2e-9, which float64 comparisons detect
    return -F.logsigmoid(-x)


def nb(x: Numbers, log_mu: Numbers, log_theta: Numbers) -> Float[Tensor, "..."]:
    """Log-probability of the negative binomial with mean exp(log_mu) and variance mu + mu^2 / exp(log_theta)."""
    theta = log_theta.exp()
    ratio = log_mu - log_theta
    choose = torch.lgamma(x + theta) - torch.lgamma(theta) - torch.lgamma(x + 1)
    # theta / (theta + mu) = sigmoid(-ratio), mu / (theta + mu) = sigmoid(ratio): the sum theta + mu would be rounded
    return choose - theta * _softplus(ratio) + x * F.logsigmoid(ratio)


def zinb(x: Numbers, log_mu: Numbers, log_theta: Numbers, zi_logits: Numbers) -> Float[Tensor, "..."]:
    """Log-probability of the negative binomial with additional zeros of probability sigmoid(zi_logits)."""
    log_p = nb(x, log_mu, log_theta)
    # log pi and log(1 - pi) share the term -softplus(zi_logits)
    return torch.where(x == 0, torch.logaddexp(log_p, zi_logits), log_p) - _softplus(zi_logits)


def normal(x: Numbers, loc: Numbers, log_scale: Numbers) -> Float[Tensor, "..."]:
    """Log-density of the normal distribution."""
    return -0.5 * ((x - loc) * (-log_scale).exp()).square() - log_scale - LOG_SQRT_2PI


def ziln(x: Numbers, loc: Numbers, log_scale: Numbers, zi_logits: Numbers) -> Float[Tensor, "..."]:
    """Log-density of the log-normal distribution for x > 0, with zeros of probability sigmoid(zi_logits)."""
    # log(0) would make the gradient NaN, although `where` below does not select its value
    log_x = torch.where(x > 0, x, 1.0).log()
    positive = normal(log_x, loc, log_scale) - log_x + F.logsigmoid(-zi_logits)
    return torch.where(x > 0, positive, F.logsigmoid(zi_logits))


def bernoulli(x: Numbers, logits: Numbers) -> Float[Tensor, "..."]:
    """Log-probability of the Bernoulli distribution, x in {0, 1}."""
    # log(1 - sigmoid(z)) = logsigmoid(-z), which is exact where the sigmoid is nearly 1
    return x * F.logsigmoid(logits) + (1 - x) * F.logsigmoid(-logits)


def predicted(output: Output, mean: Numbers, zi_logits: Numbers | None) -> Float[Tensor, "..."]:
    """Return what is asked of values with a mean without zero inflation; without logits there is none.

    Raises:
        ModelError: The output is not one of `Output`.
    """
    if output not in get_args(Output):
        raise ModelError(f"output={output!r} is not supported; allowed are {', '.join(map(repr, get_args(Output)))}")
    if output == "mean":
        return mean
    if output == "dropout":
        return torch.zeros_like(mean) if zi_logits is None else zi_logits.sigmoid().expand_as(mean)
    # sigmoid(-z), for 1 - sigmoid(z) is rounded where nearly all zeros are additional
    return mean if zi_logits is None else mean * (-zi_logits).sigmoid()


def table_rows(table: Float[Tensor, "experiment feature"], batch: Experiment) -> Float[Tensor, "#cell feature"]:
    """Return each cell's row of a table with one row per experimental batch.

    A single row is broadcast, because a copy per cell would be as large as the data.
    """
    return table if len(table) == 1 else table[batch]


FIRST = {"log_theta": FIRST_LOG_THETA, "zi_logits": FIRST_ZI_LOGIT}


LIKELIHOODS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], bool]] = {
    "rna": (nb, ("log_theta",), True),
    "atac": (zinb, ("log_theta", "zi_logits"), True),
    "methyl": (ziln, ("log_scale", "zi_logits"), False),
}
"""By modality: log-probability of (x, location, *tables), names of the tables, and whether x are counts."""


class PlainDecoder(nn.Module):
    """Decoder of one of the modalities in `LIKELIHOODS`."""

    def __init__(self, modality: str, n_features: int, n_batches: int):
        super().__init__()
        self.likelihood, self.tables, self.counts = LIKELIHOODS[modality]
        for name in ("scale", "bias", *self.tables):
            table = torch.full((n_batches, n_features), FIRST.get(name, 0.0))
            self.register_parameter(name, nn.Parameter(table))

    def forward(
        self, u: PerCell, v: Float[Tensor, "feature dim"], *, batch: Experiment, library: Library, x: Counts
    ) -> Scalar:
        """Return minus the mean log-likelihood over cells and features; library must be positive."""
        tables = (self._rows(name, batch) for name in self.tables)
        return -self.likelihood(x, self._location(u, v, batch, library), *tables).mean()

    def predicted(
        self,
        u: PerCell,
        v: Float[Tensor, "feature dim"],
        *,
        batch: Experiment,
        library: Library,
        output: Output = "expected",
    ) -> Counts:
        """Return the expected value of every feature, or another `Output`."""
        location = self._location(u, v, batch, library)
        # the mean of a log-normal distribution grows with its deviation
        log_mean = location if self.counts else location + (2 * self._rows("log_scale", batch)).exp() / 2
        zi_logits = self._rows("zi_logits", batch) if "zi_logits" in self.tables else None
        return predicted(output, log_mean.exp(), zi_logits)

    def shares(self, u: PerCell, v: Float[Tensor, "feature dim"], batch: Experiment) -> Counts:
        """Return the features' shares of a cell's counts."""
        return self._location(u, v, batch, u.new_ones(len(u), 1)).exp()

    def _location(self, u: Tensor, v: Tensor, batch: Tensor, library: Tensor) -> Tensor:
        linear = F.softplus(self._rows("scale", batch)) * (u @ v.T) + self._rows("bias", batch)
        return linear.log_softmax(dim=1) + library.log() if self.counts else linear

    def _rows(self, name: str, batch: Tensor) -> Tensor:
        return table_rows(self.get_parameter(name), batch)
