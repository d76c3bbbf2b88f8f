"""Local attention, forward and backward: eager, in chunks (S3), fused, and fused with kept weights, in time and memory.

    python -m benchmarks.attention_speed [--threads 2] [--rounds 7]

Sizes are those of one stratum of 500 kb data (K 10 and K 32). In every round a plain product of matrices and the four
run one after the other, so that what else runs on the machine disturbs all alike; given are medians over the rounds.
Share is the rate of the fused ones, of 7 products of matrices of 2 N 3w D each (2 forward; 5 backward, where the scores
are computed again) or 6 (with kept weights), by the rate of the plain product in the same round. Peak is what is alive
at most, above the inputs; distance is the largest relative difference of output and gradients from the eager ones in
float64. Takes about 25 seconds on two quiet cores.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.models.decoders.local_attention import LocalAttention
from lightning_amp.parallel.attention.fused import fuse_attention
from lightning_amp.parallel.attention.s3_chunked import chunk_attention
from lightning_amp.quantities import format_bytes

SIZES = ((5400, 64, 200), (5400, 128, 640))
"""Anchors N, channels D, window w."""
UNITS = {"fused": 7, "kept": 6}
PLAIN = 2048
"""Rows and columns of the matrices of the plain product."""
LINE = "{:>7} {:>3} {:>4}  {:<8} {:>10} {:>11} {:>9} {:>6} {:>9} {:>9} {:>9}"
HEAD = (
    "anchors",
    "D",
    "w",
    "form",
    "forward ms",
    "backward ms",
    "speed-up",
    "share",
    "GFLOP/s",
    "peak",
    "distance",
)


def forms(dim: int, window: int) -> dict[str, nn.Module]:
    """The attention to compare, eager first."""
    eager = LocalAttention(dim, window)
    return {
        "eager": eager,
        "chunks": chunk_attention(eager, buckets=1),
        "fused": fuse_attention(eager),
        "kept": fuse_attention(eager, keep=True),
    }


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def draw(n: int, dim: int) -> list[Tensor]:
    """Queries that are the keys too, values, and the gradient of the output."""
    qk, values, grad = torch.randn(3, n, dim, generator=torch.Generator().manual_seed(0))
    return [qk.requires_grad_(), values.requires_grad_(), grad]


def step(attention: nn.Module, qk: Tensor, values: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    out = attention(qk, qk, values)
    return [out.detach(), *torch.autograd.grad(out, (qk, values), grad)]


def times(attention: nn.Module, qk: Tensor, values: Tensor, grad: Tensor) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    begin = time.perf_counter()
    out = attention(qk, qk, values)
    middle = time.perf_counter()
    torch.autograd.grad(out, (qk, values), grad)
    return middle - begin, time.perf_counter() - middle


def peak_bytes(attention: nn.Module, inputs: list[Tensor]) -> int:
    """Most bytes alive above the inputs."""
    with LiveBytes() as live:
        step(attention, *inputs)
        return live.peak


def distance(attention: nn.Module, eager: nn.Module, inputs: list[Tensor]) -> float:
    """Largest relative difference from the eager results in float64, by norm."""
    exact = step(eager, *(x.detach().double().requires_grad_(x.requires_grad) for x in inputs))
    pairs = zip(step(attention, *inputs), exact, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def compare(n: int, dim: int, window: int, *, rounds: int) -> None:
    """Print a line per form."""
    inputs, attentions = draw(n, dim), forms(dim, window)
    a, b = torch.randn(2, PLAIN, PLAIN)
    plain: list[float] = []
    spent: dict[str, list[tuple[float, float]]] = {form: [] for form in attentions}
    # the first round warms up and is dropped
    for _ in range(rounds + 1):
        plain.append(2 * PLAIN**3 / seconds(lambda: a @ b))
        for form, attention in attentions.items():
            spent[form].append(times(attention, *inputs))
    plain, spent = plain[1:], {form: pairs[1:] for form, pairs in spent.items()}
    for form, attention in attentions.items():
        totals = [sum(pair) for pair in spent[form]]
        rates = [UNITS.get(form, 0) * 2 * n * 3 * window * dim / total for total in totals]
        faster = median(sum(e) / total for e, total in zip(spent["eager"], totals, strict=True))
        share = median(rate / peak for rate, peak in zip(rates, plain, strict=True))
        forward, backward = (1e3 * median(part) for part in zip(*spent[form], strict=True))
        print(
            LINE.format(
                *(n, dim, window, form, f"{forward:.1f}", f"{backward:.1f}", f"{faster:.2f}"),
                *((f"{share:.0%}", f"{median(rates) / 1e9:.0f}") if form in UNITS else ("", "")),
                format_bytes(peak_bytes(attention, inputs)),
                f"{distance(attention, attentions['eager'], inputs):.1e}",
            ),
            flush=True,
        )
    print(f"plain product {median(plain) / 1e9:.0f} GFLOP/s")


def main() -> None:
    """Compare at every size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(LINE.format(*HEAD))
    for size in SIZES:
        compare(*size, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
