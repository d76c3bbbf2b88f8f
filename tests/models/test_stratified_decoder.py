"""The stratified decoder is its equations: compared in float64 with loops over cells, strata and attended anchors."""

import math

import pytest
import torch

from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.models.decoders.stratum_keys import AttentionKey, ConvolutionKey, FullAttention

N, D, B, WINDOW = 7, 4, 3, 2
NODES = [list(range(7)), [0, 1, 2, 4, 5], [0, 1, 3, 4]]
DISTANCES = [0, 1, 2]
FORMS = {
    "higlue": {"variant": "higlue"},
    "paper": {"variant": "paper"},
    "higlue, chained": {"variant": "higlue", "chained": True},
    "paper, chained": {"variant": "paper", "chained": True},
    "convolution": {"key": "convolution"},
    "full attention": {"key": "full_attention"},
    "head": {"strata_weight_head": True},
    "binarized": {"binarized": True},
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def decoder(n_batches=2, **form):
    torch.manual_seed(0)
    window = None if form.get("key") == "full_attention" else WINDOW
    made = StratifiedDecoder(
        D, NODES, stratum_index=DISTANCES, n_anchors=N, n_batches=n_batches, window=window, **form
    ).double()
    for parameter in made.parameters():  # nothing at its initial zero, so that every term shows
        torch.nn.init.normal_(parameter, std=0.7)
    return made


def data(n_batches=2):
    generator = torch.Generator().manual_seed(1)
    x = torch.poisson(torch.full((B, 16), 1.5, dtype=torch.float64), generator=generator)
    u = torch.randn(B, D, generator=generator, dtype=torch.float64, requires_grad=True)
    v = torch.randn(N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    batch = torch.tensor([0, 1, 1]) % n_batches
    return {"u": u, "v": v, "batch": batch, "library": x.sum(1, keepdim=True), "x": x}


def layer_norm(row, norm):
    mean = sum(row) / D
    deviation = (sum((r - mean) ** 2 for r in row) / D + norm.eps).sqrt()
    return torch.stack([(r - mean) / deviation for r in row]) * norm.weight + norm.bias


def rotated(row, position):
    out = [None] * D
    for i in range(D // 2):
        frequency = float(torch.tensor(1 / 10000 ** (2 * i / D), dtype=torch.float32))
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[i] = row[i] * cos - row[i + D // 2] * sin
        out[i + D // 2] = row[i + D // 2] * cos + row[i] * sin
    return torch.stack(out)


def attended(qk, values, w):
    zero = torch.zeros(D, dtype=torch.float64)
    rows, n_buckets = [], math.ceil(N / w)
    for i in range(N):
        bucket, scores, seen = i // w, [], []
        for j in range((bucket - 1) * w, (bucket + 2) * w):
            if not 0 <= j < n_buckets * w:
                continue
            key = qk[j] / qk[j].norm() if j < N else zero
            query = rotated(qk[i] / math.sqrt(D), 2 * w + i % w)
            self_score = torch.tensor(-5e4, dtype=torch.float64)
            scores.append(self_score if j == i else query @ rotated(key, j - (bucket - 1) * w))
            seen.append(values[j] if j < N else zero)
        rows.append(torch.stack(scores).softmax(0) @ torch.stack(seen))
    return rows


def attended_by_all(qk, values):
    rows = []
    for query in qk:
        scores = torch.stack([query @ key for key in qk]) / math.sqrt(D)
        rows.append(scores.softmax(0) @ torch.stack(values))
    return rows


def gated(row, ff):
    h = ff.weight @ row
    gate = h[D:]
    return h[:D] * gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))


def key_rows(stratum, v):
    if stratum.key is None:
        return list(v), v
    if isinstance(stratum.key, ConvolutionKey):
        conv, k = stratum.key.pairs, stratum.distance
        rows = []
        for i in range(N):
            partner = v[i + k] if i + k < N else torch.zeros(D, dtype=torch.float64)
            row = conv.weight[:, 0, 0] * v[i] + conv.weight[:, 0, 1] * partner + conv.bias
            rows.append(torch.where(row > 0, row, 0.2 * row))
        return rows, v
    block = stratum.key
    p = [layer_norm(row, block.prenorm) for row in v]
    qk = [block.qk.weight @ row for row in p]
    val = [block.value.weight @ row for row in p]
    higlue = block.residual
    values = p if higlue else val
    full = isinstance(block.attention, FullAttention)
    met = attended_by_all(qk, values) if full else attended(qk, values, WINDOW)
    key = [a + b for a, b in zip(val, met, strict=True)]
    if higlue:
        return [row + gated(layer_norm(row, block.postnorm), block.ff) for row in key], torch.stack(val)
    return [gated(row, block.ff) for row in key], torch.stack(val)


def log_zinb(x, mu, theta, pi):
    p = (
        torch.lgamma(x + theta)
        - torch.lgamma(theta)
        - torch.lgamma(x + 1)
        + theta * (theta / (theta + mu)).log()
        + x * (mu / (theta + mu)).log()
    ).exp()
    return ((pi if x == 0 else 0) + (1 - pi) * p).log()


def literal(decoder, u, v, batch, library, x, binarized=False):
    """Loss and expected contacts, entry by entry."""
    total, means, column = 0, torch.zeros(B, 16, dtype=torch.float64), 0
    for k, (stratum, nodes) in enumerate(zip(decoder.strata, NODES, strict=True)):
        key, val = key_rows(stratum, v)
        for c in range(B):
            b = batch[c]
            share = decoder.strata_weights
            if decoder.head is not None:
                share = share + decoder.head.weight @ u[c] + decoder.head.bias
            weight = share.softmax(0)[k]
            decoded = torch.stack([u[c] @ key[n] for n in nodes])
            logits = (1 + stratum.scale[b].exp()).log() * decoded + stratum.bias[b]
            mu = logits.softmax(0) * library[c, 0] * weight
            for f in range(len(nodes)):
                if binarized:
                    p = logits[f].sigmoid()
                    total = total - (p if x[c, column + f] > 0 else 1 - p).log()
                    means[c, column + f] = p.detach()
                    continue
                theta, pi = stratum.log_theta[b, f].exp(), stratum.zi_logits[b, f].sigmoid()
                total = total - log_zinb(x[c, column + f], mu[f], theta, pi)
                means[c, column + f] = mu[f].detach() * (1 - pi.detach())
        column += len(nodes)
        v = val if decoder.chained and stratum.key is not None else v
    return total / (B * 16), means


@forms
@pytest.mark.parametrize("n_batches", [1, 2])
def test_loss_gradients_and_means_are_the_equations(form, n_batches):
    model, inputs = decoder(n_batches, **form), data(n_batches)
    expected, means = literal(model, **inputs, binarized=form.get("binarized", False))
    found = model(**inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    leaves = [inputs["u"], inputs["v"], *model.parameters()]
    # a chained decoder has a projection that nothing reads in its last stratum, a binarized one unused tables
    for a, b in zip(
        torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected, leaves, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)
    x = inputs.pop("x")
    torch.testing.assert_close(model.predicted(**inputs), means, rtol=1e-12, atol=0)
    assert means.shape == x.shape


def test_refusals():
    arguments = {"stratum_index": DISTANCES, "n_anchors": N, "n_batches": 1}
    with pytest.raises(ModelError, match="only attention keys can be chained"):
        StratifiedDecoder(D, NODES, key="convolution", chained=True, **arguments)
    with pytest.raises(ModelError, match=r"key='dense'\): choose one of \('attention', 'full_attention'"):
        StratifiedDecoder(D, NODES, key="dense", **arguments)
    with pytest.raises(ModelError, match=r"variant='newest'\): choose one of \('higlue', 'paper'\)"):
        StratifiedDecoder(D, NODES, variant="newest", **arguments)
    with pytest.raises(ModelError, match="got 2 strata and 3 stratum indices"):
        StratifiedDecoder(D, NODES[:2], **arguments)
    with pytest.raises(ModelError, match="stratum 2 has no feature"):
        StratifiedDecoder(D, [*NODES[:2], []], **arguments)
    with pytest.raises(ModelError, match=r"stratum 0 has anchors 0\.\.6, allowed are 0\.\.4"):
        StratifiedDecoder(D, NODES, stratum_index=DISTANCES, n_anchors=5, n_batches=1)
    with pytest.raises(ModelError, match=r"stratum=0\): a pair needs a distance"):
        ConvolutionKey(D, 0)
    with pytest.raises(ModelError, match="choose one of"):
        AttentionKey(D, 2, variant="other")


def test_wrong_shapes_are_refused():
    model, inputs = decoder(), data()
    with pytest.raises(ModelError, match="got x with 15 columns, but its strata have 16 features"):
        model(**inputs | {"x": inputs["x"][:, 1:]})
    with pytest.raises(ModelError, match="got v with 6 rows, but it was built for 7 anchors"):
        model(**inputs | {"v": inputs["v"][1:]})
