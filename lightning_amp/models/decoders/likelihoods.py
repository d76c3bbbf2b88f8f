"""Log-probabilities of observed values, elementwise and finite in value and gradient.

Counts are given by log mean and log inverse dispersion, because means are softmax fractions that underflow.
Zero-inflated densities add mass and density at zero, log(pi + (1 - pi) p(0)), as the GLUE family does; the
log-normal one has no density at zero, so zero has probability pi.
Known limit: in float32 nb of x > 0 loses digits for inverse dispersions above 1e4 (a difference of two lgamma).
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lightning_amp.shapes import Experiment

FIRST_LOG_THETA, FIRST_ZI_LOGIT = 1.5, -2.0
"""Where tables start that the data do not determine. A step of RMSprop moves an entry by about the learning rate: from
0 and 0 (variance mu + mu^2, half of the zeros unexplained) hundreds of steps go by in which a count says little of its
mean, so that modalities align late and often wrongly."""

Numbers = Float[Tensor, "*#shape"]
"""Broadcast against each other."""

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def _softplus(x: Tensor) -> Tensor:
    # torch's softplus is the identity above 20, an error of 2e-9 that float64 comparisons would see
    return -F.logsigmoid(-x)


def nb(x: Numbers, log_mu: Numbers, log_theta: Numbers) -> Float[Tensor, "..."]:
    """Negative binomial with mean exp(log_mu) and variance mu + mu^2 / exp(log_theta)."""
    theta = log_theta.exp()
    ratio = log_mu - log_theta
    choose = torch.lgamma(x + theta) - torch.lgamma(theta) - torch.lgamma(x + 1)
    return choose - theta * _softplus(ratio) + x * F.logsigmoid(ratio)


def zinb(x: Numbers, log_mu: Numbers, log_theta: Numbers, zi_logits: Numbers) -> Float[Tensor, "..."]:
    """Negative binomial with additional zeros of probability sigmoid(zi_logits)."""
    return _inflate(x, nb(x, log_mu, log_theta), zi_logits)


def normal(x: Numbers, loc: Numbers, log_scale: Numbers) -> Float[Tensor, "..."]:
    """Normal density."""
    return -0.5 * ((x - loc) * (-log_scale).exp()).square() - log_scale - LOG_SQRT_2PI


def ziln(x: Numbers, loc: Numbers, log_scale: Numbers, zi_logits: Numbers) -> Float[Tensor, "..."]:
    """Log-normal density of x > 0, and zeros of probability sigmoid(zi_logits)."""
    log_x = torch.where(x > 0, x, 1.0).log()
    positive = normal(log_x, loc, log_scale) - log_x + F.logsigmoid(-zi_logits)
    return torch.where(x > 0, positive, F.logsigmoid(zi_logits))


def bernoulli(x: Numbers, logits: Numbers) -> Float[Tensor, "..."]:
    """Bernoulli of x in {0, 1}."""
    return x * F.logsigmoid(logits) + (1 - x) * F.logsigmoid(-logits)


def _inflate(x: Tensor, log_p: Tensor, zi_logits: Tensor) -> Tensor:
    at_zero = torch.logaddexp(log_p, zi_logits)
    return torch.where(x == 0, at_zero, log_p) - _softplus(zi_logits)


def table_rows(
    table: Float[Tensor, "experiment feature"], batch: Experiment
) -> Float[Tensor, "#cell feature"]:
    """Each cell's row of a table with one row per experimental batch.

    A single row is broadcast, because a copy per cell would cost as much as the data.
    """
    return table if len(table) == 1 else table[batch]
