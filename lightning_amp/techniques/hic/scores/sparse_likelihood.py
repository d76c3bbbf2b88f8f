"""Compute the likelihood of all counts as if they were zero, and correct it for nonzero counts (sparse).

    r = log_mu - log_theta      n = -theta softplus(r)      s = zi_logits      l(p, q) = log(e^p + e^q)
    x = 0     log p = l(n, q) - softplus(s)                               q = l(s, log least)
              d / d log_mu = -a theta sigmoid(r)                          a = sigmoid(n - q)
              d / d log_theta = a n - d / d log_mu                       d / d s = sigmoid(q - n) e^(s - q) - sigmoid(s)
    x != 0    log p = lgamma(x + theta) - lgamma(theta) - lgamma(x + 1) + n + x log sigmoid(r) - softplus(s)
              d / d log_mu = x sigmoid(-r) - theta sigmoid(r)             d / d s = -sigmoid(s)
              d / d log_theta = theta (psi(x + theta) - psi(theta) - softplus(r)) - d / d log_mu

`least` is a small number that some models add to the probability of a zero before the logarithm (HiGLUE's EPS). It is
found by probing, and is 0 for most models. n - softplus(s) and theta sigmoid(r) are terms of both kinds of counts. For
a nonzero count q - n is set to minus infinity, which removes the additional zeros. Exact up to rounding: log p of a
zero is not used for a nonzero count, so nothing cancels. No collectives. Saved: lgamma and psi are computed for nonzero
counts only, and of all [B, F_k] that the likelihood kept only the gradient of log_mu remains. Gradients are computed
together with the value; a backward pass only scales them, and may run many times.

Elements in addition to the arguments, with T = 1 or B rows of the tables and M nonzero counts:

    kept for the backward pass    (B + 2 T) F_k
    peak of the forward pass      the same, and the larger of 18 M and 11 M + 3 chunks (6 if T = B)
    peak of the backward pass     twice what was kept; the second half is returned

Legend: cell (B), own_feature (F_k of one stratum, or those of this rank), psi = digamma.
Known limits: no second derivative, no gradient of the counts, and the limits of nonzero_counts.py. A likelihood that
differs for other values than those of checks/likelihood.py is not detected. Counts that it does not allow raise an
error on the CPU only, because other devices would have to be synchronised. Inputs below float32 are computed and summed
in float32.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp._torch import negate_each, softplus_backward, times_each, values_are_checked
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.derivatives import first_only
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.equal_parts import leaves_out_equal
from lightning_amp.footprint.operator_rates import standing_for
from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.shapes import OwnCounts, OwnTable, Scalar
from lightning_amp.techniques.checks.likelihood import likelihood_problem, likelihood_settings
from lightning_amp.techniques.checks.same_function import found_out
from lightning_amp.techniques.hic.attention.sizes import type_of_sums
from lightning_amp.techniques.hic.rows import sparse_columns
from lightning_amp.techniques.hic.scores.nonzero_counts import Entries, entries
from lightning_amp.techniques.precomputed_gradients import wants_gradients

EXACT = 40.0
"""From here on softplus(x) equals x, and sigmoid(x) equals 1, in float64."""


def sparse_likelihood(leaf: nn.Module, spec: object = None, mesh: object = None) -> nn.Module:
    """Return an equivalent likelihood, whose costs depend on the number of nonzero counts."""
    problem = found_out(leaf, _sparse_problem)
    if problem:
        raise InstallError(
            f"sparse does not support {type(leaf).__name__!r}, which {problem}; only a module without state that"
            " returns the summed log-probability of zero-inflated negative binomial counts, when called as leaf(x,"
            " log_mu, log_theta, zi_logits), can be replaced: leave 'sparse' out, as for binarized strata"
        )
    return _like(leaf)


class SparseZINB(nn.Module):
    """Zero-inflated negative binomial likelihood of mostly zero counts; made by `sparse_likelihood`."""

    stays_eager = True

    def __init__(self, *, least: float = 0.0, whole: tuple[bool, bool] = (False, False)) -> None:
        super().__init__()
        self.least = least
        self.whole = whole

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"least={self.least}, whole={self.whole}"

    def forward(
        self, x: OwnCounts | SparseCounts, log_mu: OwnCounts, log_theta: OwnTable, zi_logits: OwnTable
    ) -> Scalar:
        """Return the log-probability, summed over cells and features."""
        if tuple(x.shape) != tuple(log_mu.shape):
            raise ModelError(
                f"a sparse likelihood got counts of the shape {tuple(x.shape)!r} for means of the shape "
                f"{tuple(log_mu.shape)!r}; pass the stratum's own columns, or leave 'sparse' out"
            )
        if isinstance(x, Tensor) and wants_gradients((x,)):
            raise InstallError(
                "a sparse likelihood got counts that need a gradient, which it does not compute; detach them, or leave"
                " 'sparse' out"
            )
        arguments = (log_mu, log_theta, zi_logits)
        if not wants_gradients(arguments):
            return _sum(x, arguments, self)
        return cast(Tensor, _WithGradients.apply(x, self, *arguments))  # type: ignore[no-untyped-call]

    def check(self, counts: Float[Tensor, " entry"]) -> None:
        """Raise an error for counts that the replaced likelihood does not allow."""
        if not self.whole[values_are_checked()] or launches_operators(counts):
            return
        wrong = counts[~((counts >= 0) & (counts.frac() == 0))]
        if len(wrong):
            raise ModelError(
                f"a likelihood got counts such as {float(wrong[0])!r}; allowed are whole numbers from "
                "0: pass the counts as they were read, not scaled ones"
            )


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor | SparseCounts, form: SparseZINB, *arguments: Tensor) -> Tensor:
        dtype = type_of_sums(*(t.dtype for t in arguments))
        gradients = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in arguments]
        total = _sum(x, arguments, form, gradients)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @first_only("a sparse likelihood, whose gradients are numbers by then; leave 'sparse' out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *times_each(ctx.saved_tensors, grad)


def _sum(
    x: Tensor | SparseCounts, arguments: Sequence[Tensor], form: SparseZINB, gradients: Sequence[Tensor] = ()
) -> Tensor:
    """Return the summed log-probability; fill `gradients` if there are any."""
    dtype = type_of_sums(*(t.dtype for t in arguments))
    log_mu, log_theta, zi = arguments
    cells, features = log_mu.shape
    width = sparse_columns(cells, launched=launches_operators(log_mu))
    runs = [slice(first, min(first + width, features)) for first in range(0, max(features, 1), width)]
    found = entries(x, runs, dtype=dtype)
    form.check(found.value)
    index = found.index(features)
    # r is stored where the gradient of log_mu will be
    r = gradients[0] if gradients else torch.empty(log_mu.shape, dtype=dtype, device=log_mu.device)
    log_theta, zi = log_theta.to(dtype), zi.to(dtype)
    torch.sub(log_mu, log_theta, out=r)
    # the nonzero counts also read a table with one row, or of all columns at once
    theta = log_theta.exp() if len(runs) == 1 or len(log_theta) == 1 else None
    others = _others(found, index, r, (log_theta, theta), bool(gradients))
    work = log_mu.new_empty(3, cells, runs[0].stop, dtype=dtype)
    totals = []
    # full chunks are equal; the last of them runs beside the sums of all others
    left_out = max(0, len(runs) - 3) if leaves_out_equal(work) else 0
    for k, run in enumerate(runs):
        if 0 < k <= left_out:
            totals.append(work.new_empty(()))
            continue
        if len(runs) == 1:
            totals.append(_zeros(work, index, r, (cast(Tensor, theta), zi), form.least, gradients, others))
            continue
        # the first one is counted for those that are left out
        with standing_for(1 if k else 1 + left_out):
            width = run.stop - run.start
            chunk = work.view(3, -1)[:, : cells * width].view(3, cells, width)
            tables = (log_theta[:, run].exp() if theta is None else theta[:, run], zi[:, run])
            terms = [t[found.own(k)] for t in others]
            own = [t[:, run] for t in gradients]
            totals.append(_zeros(chunk, found.places(k), r[:, run], tables, form.least, own, terms))
    if gradients:
        gradients[0].view(-1).index_add_(0, index, others[1])
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()


def _zeros(
    work: Tensor,
    places: Tensor,
    r: Tensor,
    tables: Sequence[Tensor],
    least: float,
    gradients: Sequence[Tensor],
    others: Sequence[Tensor],
) -> Tensor:
    """Compute the terms of some columns: of zeros, and at `places` in the flat chunk of nonzero counts.

    r is overwritten by the gradient of log_mu, except for the terms that are added for nonzero counts.
    """
    theta, zi = tables
    p, softplus, odds = work.unbind()
    q, inflated = zi, F.logsigmoid(zi)
    if least:
        log_least = zi.new_full((), math.log(least))
        q, inflated = torch.logaddexp(zi, log_least), torch.logaddexp(inflated, log_least - _softplus(zi))
    # minus theta, which is not used after this, and minus softplus(zi)
    missing = _softplus(zi)
    negate_each([theta, missing])
    _softplus(r, out=softplus)
    # p = n - softplus(zi), the first term of nonzero counts, and then log(e^n + e^q). The values at `places` are read
    # before p is overwritten, and written back after, so that the sum has the right term for every count
    torch.addcmul(missing, theta, softplus, out=p)
    flat = p.view(-1)
    value = flat.index_select(0, places).add_(others[0])
    torch.logaddexp(p, inflated, out=p)
    total: Tensor = flat.index_copy_(0, places, value).sum()
    if gradients:
        _, of_theta, of_zi = gradients
        # q - n: its sigmoid is the probability that a zero is an additional one, which is 0 for nonzero counts
        torch.addcmul(q, theta, softplus, value=-1, out=odds).view(-1).index_fill_(0, places, -math.inf)
        # minus theta sigmoid(n - q), then times sigmoid(r); theta is negative here, and at `places` odds are minus
        # infinity, so that -theta sigmoid(r) remains there
        scale = _times_sigmoid(theta, odds, sign=-1, out=p)
        of_mu = _times_sigmoid(scale, r, out=r)
        share = odds.sigmoid_()
        if least:
            share.mul_((zi - q).exp())
        # minus the gradient of log_theta
        torch.addcmul(of_mu, scale, softplus, value=-1, out=softplus)
        softplus.view(-1).index_add_(0, places, others[2])
        # softplus and odds now hold the gradients of log_theta and zi for every cell
        minus_theta, share = _rows(work[1:], (of_theta, of_zi))
        torch.neg(minus_theta, out=of_theta)
        torch.sigmoid(zi, out=missing)
        torch.sub(share, missing, alpha=len(r) if len(of_zi) == 1 else 1, out=of_zi)
    return total


def _others(
    found: Entries, index: Tensor, r: Tensor, tables: tuple[Tensor, Tensor | None], with_gradients: bool
) -> list[Tensor]:
    """Return terms of nonzero counts besides n - softplus(zi): value, gradient of log_mu, minus that of log_theta."""
    x = found.value
    r = r.view(-1).index_select(0, index)
    theta, gammas = _gammas(x, tables, found.column if len(tables[0]) == 1 else index, with_gradients)
    # plus x log sigmoid(r)
    value = torch.sub(gammas[0], found.log_factorial).addcmul_(x, F.softplus(r, -1.0, EXACT))
    if not with_gradients:
        return [value]
    # not x - x sigmoid(r), which loses all digits if r is large
    of_mu = _times_sigmoid(x, r, sign=-1, out=r.new_empty(r.shape))
    return [value, of_mu, torch.addcmul(of_mu, theta, gammas[1], value=-1)]


def _gammas(
    x: Tensor, tables: tuple[Tensor, Tensor | None], place: Tensor, with_gradients: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return theta at its positions, and lgamma(x + theta) - lgamma(theta), with gradients also the same for psi."""
    functions = (torch.lgamma, torch.digamma)[: 1 + with_gradients]
    log_theta, known_theta = tables
    if log_theta.numel() < len(x) and not launches_operators(x):
        # entries of the table are used many times, so its functions are computed once per entry
        table = (log_theta.exp() if known_theta is None else known_theta).view(-1)
        rows = torch.stack([table, *(function(table) for function in functions)])
        theta, *known = rows.index_select(1, place).unbind()
        shape = x + theta
        return theta, [function(shape).sub_(own) for function, own in zip(functions, known, strict=True)]
    both = x.new_empty(2, len(x))
    theta, shape = both.unbind()
    if known_theta is None:
        torch.exp(log_theta.reshape(-1).index_select(0, place), out=theta)
    else:
        torch.index_select(known_theta.view(-1), 0, place, out=theta)
    torch.add(x, theta, out=shape)
    values = x.new_empty(len(functions), 2, len(x))
    for function, out in zip(functions, values.unbind(), strict=True):
        function(both, out=out)
    of_theta, of_shape = values.unbind(1)
    return theta, (of_shape - of_theta).unbind()


def _rows(values: Tensor, tables: Sequence[Tensor]) -> list[Tensor]:
    """Sum values of all cells, [2, cell, feature], over cells for tables with a single row."""
    if all(len(table) == 1 for table in tables):
        return list(values.sum(1, keepdim=True).unbind())
    return [v.sum(0, keepdim=True) if len(t) == 1 else v for v, t in zip(values, tables, strict=True)]


def _times_sigmoid(factor: Tensor, x: Tensor, *, sign: int = 1, out: Tensor) -> Tensor:
    """Compute factor * sigmoid(sign * x), which is 0 if sign * x is minus infinity."""
    # the backward pass of softplus multiplies by a sigmoid; one pass over the data
    found: Tensor = softplus_backward(factor, x, sign, EXACT, grad_input=out)
    return found


def _softplus(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    # torch's default threshold of 20 has an error of 2e-9; from 40 on the error is below float64's precision
    found: Tensor = F.softplus(x, 1.0, EXACT, out=out)  # type: ignore[call-arg]
    return found


def _sparse_problem(leaf: nn.Module) -> str:
    ours = _like(leaf)
    return likelihood_problem(leaf, ours, whole=ours.whole)


def _like(leaf: nn.Module) -> SparseZINB:
    """Return a `SparseZINB` with a likelihood's settings; `_sparse_problem` checks whether it is supported."""
    least, whole = found_out(leaf, likelihood_settings)
    return SparseZINB(least=least, whole=whole)
