"""Claim: the EPM, from shapes alone, predicts the bytes alive after every stratum to 1 % and the step's peak to 5 %."""

from dataclasses import replace

import pytest
import torch

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.installing.describe_module import describe
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.planning.memory.peak_model import estimate
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.techniques.hic.attention.s3_chunked import chunk_attention
from lightning_amp.techniques.hic.block_sizes import chunk_buckets
from lightning_amp.techniques.hic.scores.s4_key_first import key_first

CASES = [
    {"anchors": 250, "dim": 32, "batch": 16, "window": 32},
    {"anchors": 250, "dim": 32, "batch": 16, "window": 50, "n_batches": 3},
    {"anchors": 256, "dim": 16, "batch": 4, "window": 64, "variant": "paper"},
    {"anchors": 301, "dim": 32, "batch": 8, "window": 40, "chained": True},
    {"anchors": 250, "dim": 32, "batch": 64, "window": 16},
    {"anchors": 250, "dim": 32, "batch": 16, "window": 32, "key": "convolution"},
    {"anchors": 250, "dim": 32, "batch": 16, "window": None, "key": "full_attention"},
    {"anchors": 250, "dim": 31, "batch": 4, "window": None, "key": "full_attention", "variant": "paper"},
]


def decoder(*, anchors, dim, window, n_batches=1, **settings) -> StratifiedDecoder:
    strata = 8
    return StratifiedDecoder(
        dim,
        [list(range(anchors - k)) for k in range(strata)],
        stratum_index=list(range(strata)),
        n_anchors=anchors,
        n_batches=n_batches,
        window=window,
        **settings,
    )


def measure(module: StratifiedDecoder, batch: int) -> tuple[list[int], int]:
    """Bytes alive after each stratum, and the peak of forward and backward."""
    u = torch.randn(batch, module.dim, requires_grad=True)
    v = torch.randn(module.n_anchors, module.dim, requires_grad=True)
    x = torch.poisson(torch.rand(batch, module.n_features))
    n_batches = len(module.strata[0].scale)
    alive: list[int] = []
    with LiveBytes() as live:
        hooks = [s.register_forward_hook(lambda *_: alive.append(live.current)) for s in module.strata]
        batches = torch.arange(batch) % n_batches
        module(u, v, batch=batches, library=x.sum(1, keepdim=True) + 1, x=x).backward()
    for hook in hooks:
        hook.remove()
    return alive, live.peak


AXES = [Axes(), Axes(attention="chunked"), Axes(decode="key-first")]


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        (c, a)
        for c in CASES
        for a in AXES
        if a.attention != "chunked" or c.get("key", "attention") == "attention"
    ],
)
def test_prediction_matches_the_bytes_that_are_alive(case, axes) -> None:
    settings = dict(case)
    batch = settings.pop("batch")
    module = decoder(**settings)
    for stratum in module.strata:
        if axes.attention == "chunked" and stratum.key is not None:
            buckets = chunk_buckets(module.window)
            stratum.key.attention = chunk_attention(stratum.key.attention, buckets=buckets)
        if axes.decode == "key-first":
            stratum.decode = key_first(stratum.decode)
    predicted = estimate(describe(module, batch_size=batch), axes)
    weights = predicted.base_bytes
    alive, peak = measure(module, batch)
    for k, measured in enumerate(alive):
        assert predicted.strata_bytes[k] - weights == pytest.approx(measured, rel=0.01), f"after stratum {k}"
    # The decoder alone has no gradients of an earlier step.
    peak_bytes = replace(predicted, gradient_bytes=0).peak_bytes - weights
    assert peak_bytes == pytest.approx(peak, rel=0.05)
