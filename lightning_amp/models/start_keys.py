"""Let decoders begin with what the components of the cells say about each feature, instead of random keys.

For the components r_c of the training cells, the log share of a feature is its bias + r_c w_f:

    RNA, ATAC   w = pseudo-inverse of the projection: its reconstruction of log counts
    a stratum   w_f = (a_f G + I)^-1 g_f, one Newton step of Poisson regression from the shares, with the keys' prior
                g_f = sum_c (x_cf - e_cf) r_c / phi       G = sum_c S_c r_c r_c^T / phi
                a_f = mean share of f       phi = sum (x - e)^2 / sum e, at least 1       S_c = sum_f x_cf

    v of a gene      w_f / softplus(0)
    v of an anchor   [w_f / softplus(0) of its stratum 0 | directions that the other strata need]
    embedding        least squares for A embedding = v, damped; loc is the identity, deviations begin at 0.13
    value of a key   least squares for p value^T + attention(p) = w_f / softplus(0), p = LayerNorm(v), damped
    bias             such that the mean share of each feature stays that of the cells

The gated layer of a key begins as zero. With random keys and deviations of v as large as the prior's, samples are
noise, and training begins by switching latents off. Decoders of values that are not counts begin as without this file,
and so do keys without a residual (`convolution`, `paper`) or that are chained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn

from lightning_amp.models.decoders.likelihoods import PlainDecoder
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.models.decoders.stratum import Stratum
from lightning_amp.models.decoders.stratum_keys import AttentionKey
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.models.inputs import ModelInputs
from lightning_amp.models.latents import FIRST_STD
from lightning_amp.models.representation import Projection

Floats = NDArray[np.float64]
DAMPING = 1e-3
"""Added, in units of their mean, to the eigenvalues of A^T A and p^T p: v and keys that the graph or the anchors can
only show with huge entries are given up."""
ITERATIONS, ROUNDS, CELLS_AT_A_TIME = 200, 2, 256
"""Of conjugate gradients; of the corrections of biases; cells whose shares are in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Loadings:
    """What the components say about the features of one stratum."""

    stratum: Stratum
    weight: Floats  # w / softplus(0), [feature, component]
    counts: Floats  # of each feature, [feature]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The training cells of one modality."""

    counts: Any  # SciPy CSR matrix [cell, feature]
    batch: NDArray[np.int64]
    projection: Projection
    components: Floats  # [cell, component]


def start_keys(graph: GraphEncoder, decoders: nn.ModuleDict, inputs: ModelInputs, cells: dict[str, Cells]) -> None:
    """Set the graph encoder, keys and biases, by modality; the biases are the log shares of the features."""
    counted = {name: one for name, one in cells.items() if one.projection.counts}
    if not counted:
        return
    unit = float(F.softplus(torch.zeros(())))
    dim, strata = graph.embedding.shape[1], dict[str, list[Loadings]]()
    v = np.zeros((graph.n_vertices, dim))
    for name, own in counted.items():
        decoder, r = decoders[name], own.components[:, :dim]
        vertices, n = inputs.modalities[name].vertices, r.shape[1]
        if isinstance(decoder, PlainDecoder):
            v[vertices, :n] = np.linalg.pinv(own.projection.weight.double().cpu().numpy())[:, :n] / unit
            continue
        strata[name] = []
        for stratum in (cast(Stratum, module) for module in cast(StratifiedDecoder, decoder).strata):
            weight, sums = loadings(own.counts[:, slice(*stratum.columns)], own.batch, r, stratum.bias)
            if stratum.key is None:
                v[vertices[_anchors(stratum)], :n] = weight / unit
            else:
                strata[name].append(Loadings(stratum, weight / unit, sums))
        more = directions(v[vertices, :n], strata[name], r.std(axis=0), dim - n)
        v[vertices, n : n + more.shape[1]] = more
    set_vertices(graph, v)
    with torch.no_grad():
        loc = graph()[0]
        for name, own in counted.items():
            rows = graph.rows[name](loc)
            for found in strata.get(name, []):
                key = found.stratum.key
                if isinstance(key, AttentionKey) and key.residual and not found.stratum.chained:
                    set_key(key, found, rows)
            keep_shares(decoders[name], rows, own)


def _anchors(stratum: Stratum) -> NDArray[np.int64]:
    found: NDArray[np.int64] = stratum.feature_anchor.cpu().numpy()
    return found


def loadings(counts: Any, batch: NDArray[np.int64], r: Floats, bias: Tensor) -> tuple[Floats, Floats]:
    """Return w of a stratum, whose log shares in each batch are known, and the expected counts of its features."""
    x = sp.csr_matrix(counts, dtype=np.float64)
    share = bias.detach().double().softmax(dim=1).cpu().numpy()
    sums = np.asarray(x.sum(axis=1)).ravel()
    score, expected, squares = np.asarray(x.T @ r), np.zeros(x.shape[1]), float((x.data**2).sum())
    for b, own in enumerate(share):
        some = np.flatnonzero(batch == b)
        score -= np.outer(own, sums[some] @ r[some])
        expected += own * sums[some].sum()
        # of (x - e)^2, without the dense e
        squares += float((own**2).sum() * (sums[some] ** 2).sum() - 2 * sums[some] @ (x[some] @ own))
    phi = max(1.0, squares / max(expected.sum(), 1.0))
    # G has the same axes for all features, so that no system is solved
    values, axes = np.linalg.eigh((r * sums[:, None]).T @ r / phi)
    inverse = 1 / (np.outer(expected / max(sums.sum(), 1.0), np.maximum(values, 0.0)) + 1)
    return ((score / phi @ axes) * inverse) @ axes.T, expected


def directions(first: Floats, strata: list[Loadings], deviation: Floats, n: int) -> Floats:
    """Return n directions of the anchors, [anchor, n], that the loadings of strata have and `first` has not."""
    n = min(n, len(first) - 1, len(strata) * len(deviation) - 1)
    if n < 1 or not any(found.weight.any() for found in strata):
        return np.zeros((len(first), 0))
    basis, sizes, _ = np.linalg.svd(first, full_matrices=False)
    basis = basis[:, sizes > 1e-9 * sizes.max()]
    rows = [(_anchors(found.stratum), found.weight * deviation) for found in strata]

    def rest(x: Floats) -> Floats:
        return x - basis @ (basis.T @ x)

    def times(x: Floats) -> Floats:
        out = np.zeros(len(first))
        for (anchor, weight), part in zip(rows, np.ravel(x).reshape(len(rows), -1), strict=True):
            out[anchor] += weight @ part
        return rest(out)

    def back(x: Floats) -> Floats:
        left = rest(np.ravel(x))
        return np.concatenate([weight.T @ left[anchor] for anchor, weight in rows])

    shape = (len(first), len(rows) * len(deviation))
    start = np.random.default_rng(0).standard_normal(min(shape))
    found, _, _ = svds(
        LinearOperator(shape, matvec=times, rmatvec=back, dtype=np.float64), k=n, v0=start, solver="arpack"
    )
    found = found[:, ::-1] * np.sign(found[np.abs(found).argmax(axis=0), np.arange(n)])[::-1]
    # as large as those of stratum 0, for a LayerNorm reads all of them
    result: Floats = found * np.sqrt(len(first)) * (first.std() or 1.0)
    return result


@torch.no_grad()
def set_vertices(graph: GraphEncoder, v: Floats) -> None:
    """Set the embedding such that the means of the vertices are v, as far as the graph can show it."""
    source, target, coefficient = (one.cpu().numpy() for one in graph.messages())
    a = sp.csr_matrix((coefficient.astype(np.float64), (target, source)), shape=(len(v),) * 2)
    embedding = damped(a, v)
    graph.embedding.copy_(torch.from_numpy(embedding))
    nn.init.eye_(graph.loc.weight)
    nn.init.zeros_(graph.loc.bias)
    nn.init.constant_(graph.std.bias, FIRST_STD)


def damped(a: Any, v: Floats) -> Floats:
    """Return x of the least |a x - v|^2 + damping |x|^2, by conjugate gradients on all columns at once."""
    damping = DAMPING * float((a.data**2).sum()) / a.shape[1]
    x, rest = np.zeros_like(v), a.T @ v
    step, size = rest.copy(), (rest**2).sum(axis=0)
    least = 1e-16 * size
    for _ in range(ITERATIONS):
        if (size <= least).all():
            break
        image = a.T @ (a @ step) + damping * step
        length = size / np.maximum((step * image).sum(axis=0), np.finfo(np.float64).tiny)
        x, rest = x + length * step, rest - length * image
        after = (rest**2).sum(axis=0)
        step, size = rest + after / np.maximum(size, np.finfo(np.float64).tiny) * step, after
    return x


def set_key(key: AttentionKey, found: Loadings, v: Tensor) -> None:
    """Set the values of an attention key by least squares, weighted by the counts of the features."""
    p = key.prenorm(v)
    qk, anchor = key.qk(p), found.stratum.feature_anchor
    rows, attended = (x[anchor].double().cpu().numpy() for x in (p, key.attention(qk, qk, p)))
    wanted = np.zeros_like(rows)
    wanted[:, : found.weight.shape[1]] = found.weight
    weighted = rows * found.counts[:, None]
    gram = weighted.T @ rows
    gram += max(DAMPING * np.trace(gram) / len(gram), np.finfo(np.float64).tiny) * np.eye(len(gram))
    value = np.linalg.solve(gram, weighted.T @ (wanted - attended))
    key.value.weight.copy_(torch.from_numpy(value.T))
    # the half that is not the gate: the product has gradients
    nn.init.zeros_(key.ff.weight[: len(key.ff.weight) // 2])


def keep_shares(decoder: nn.Module, v: Tensor, cells: Cells) -> None:
    """Correct the biases such that cells have the same mean shares of features as with their biases alone."""
    u = torch.zeros(len(cells.components), v.shape[1], dtype=v.dtype, device=v.device)
    u[:, : cells.components.shape[1]] = torch.from_numpy(cells.components[:, : v.shape[1]])
    batch = torch.from_numpy(cells.batch).to(v.device)
    if isinstance(decoder, PlainDecoder):
        _correct(decoder.get_parameter("bias"), partial(decoder.shares, v=v), u, batch, cells.counts)
        return
    for module in cast(StratifiedDecoder, decoder).strata:
        stratum = cast(Stratum, module)
        key, v_next = stratum.keys(v)
        _correct(stratum.bias, partial(stratum.shares, key=key), u, batch, cells.counts[:, slice(*stratum.columns)])
        v = v_next


def _correct(bias: Tensor, shares: Callable[..., Tensor], u: Tensor, batch: Tensor, counts: Any) -> None:
    """Correct one table, with `shares(u=, batch=)` of some cells for the present values of it."""
    wanted = bias.log_softmax(dim=1)
    library = torch.from_numpy(np.asarray(counts.sum(axis=1)).ravel()).to(u)
    present = library.new_zeros(len(bias)).index_add_(0, batch, library) > 0
    for _ in range(ROUNDS):
        total = torch.zeros_like(bias)
        for first in range(0, len(library), CELLS_AT_A_TIME):
            own = slice(first, first + CELLS_AT_A_TIME)
            total.index_add_(0, batch[own], shares(u=u[own], batch=batch[own]) * library[own, None])
        found = (total / total.sum(dim=1, keepdim=True)).log()
        bias += torch.where(present[:, None], wanted - found, 0.0)
